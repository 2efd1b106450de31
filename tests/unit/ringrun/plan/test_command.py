from __future__ import annotations

from typing import List, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.command import Command, parse_command, with_interpreter


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "-x"], Command((None, "train.py", "-x"), None, True, "train.py")),
        (["a/b.py"], Command((None, "a/b.py"), None, True, "a/b.py")),
        (["-m", "pkg.mod", "-m"], Command((None, "-m", "pkg.mod", "-m"), None, True)),
        (["python", "t.py"], Command(("python", "t.py"), "python", True, "t.py")),
        (
            ["python3.9", "-u", "-X", "dev", "t.py", "u.py"],
            Command(("python3.9", "-u", "-X", "dev", "t.py", "u.py"), "python3.9", True, "t.py"),
        ),
        (["python", "-m", "mod", "x.py"], Command(("python", "-m", "mod", "x.py"), "python", True)),
        (["python", "-c", "pass", "x.py"], Command(("python", "-c", "pass", "x.py"), "python", True)),
        (["/opt/bin/python3", "t.py"], Command(("/opt/bin/python3", "t.py"), None, True, "t.py")),
        (["hostname"], Command(("hostname",))),
        (["./run.sh", "train.py"], Command(("./run.sh", "train.py"))),
        (["pythonic"], Command(("pythonic",))),
    ],
)
def test_commands(words: List[str], command: Command) -> None:
    assert parse_command(words) == command


@pytest.mark.parametrize("words", [[], [""], ["-m"], ["-m", "-x"]])
def test_bad_commands(words: List[str]) -> None:
    with pytest.raises(ConfigError, match="ringrun -np"):
        parse_command(words)


@pytest.mark.parametrize(("python", "first"), [(None, None), ("/p/python", "/p/python")])
def test_the_word_python_is_replaced(python: Optional[str], first: Optional[str]) -> None:
    assert with_interpreter(parse_command(["python", "t.py"]), python).argv == (first, "t.py")
    assert with_interpreter(parse_command(["/bin/python", "t.py"]), python).argv == ("/bin/python", "t.py")
    assert with_interpreter(parse_command(["t.py"]), python).argv == (None, "t.py")
