from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.job import Command, in_tree, parse_command


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
        (["python", "-"], Command(("python", "-"), "python", True)),
        (["python", "-u"], Command(("python", "-u"), "python", True)),
        (["python", "-W"], Command(("python", "-W"), "python", True)), (["hostname"], Command(("hostname",))),
        (["./run.sh", "train.py"], Command(("./run.sh", "train.py"))), (["pythonic"], Command(("pythonic",))),
    ],
)
def test_commands(words: List[str], command: Command) -> None:
    assert parse_command(words) == command


@pytest.mark.parametrize("words", [[], [""], ["-m"], ["-m", "-x"]])
def test_bad_commands(words: List[str]) -> None:
    with pytest.raises(ConfigError, match="ringrun -np"):
        parse_command(words)


@pytest.mark.parametrize(
    ("word", "told"),
    [("user@host1", "commas"), ("host1:2", "commas"), (",host1", "commas"), ("host1,", "commas"),
     ("[fe80::1]:2", "commas"), ("B=2", "-x of its own")],
)  # fmt: skip
def test_lists_that_the_shell_has_split(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_command([word, "train.py"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{root}/scripts/train.py", "{root}/x"], (None, "train.py", "{root}/x")),
        (["{root}/other/train.py"], (None, "../other/train.py")),
        (["/p/python", "-u", "{root}/train.py"], ("/p/python", "-u", "../train.py")),
        (["{root}/link/train.py"], (None, "../other/train.py")),
        (["/elsewhere/train.py"], (None, "/elsewhere/train.py")), (["train.py"], (None, "train.py")),
        (["-m", "pkg"], (None, "-m", "pkg")),
    ],
)
def test_an_absolute_script_in_the_tree_becomes_relative(
    tmp_path: Path, words: List[str], expected: Tuple[Optional[str], ...]
) -> None:
    for name in ("scripts", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("other")
    command = parse_command([word.format(root=tmp_path) for word in words])
    found = in_tree(command, tmp_path, tmp_path / "scripts")
    assert found.argv == tuple(word and word.format(root=tmp_path) for word in expected)
    assert found.script in (None, *found.argv)


@pytest.mark.parametrize(
    ("script", "above"), [("../train.py", ".."), ("../../lib/train.py", "../.."), ("sub/../../x.py", "..")]
)
def test_a_relative_script_that_is_not_sent_is_refused(tmp_path: Path, script: str, above: str) -> None:
    cwd = tmp_path / "a" / "scripts"
    cwd.mkdir(parents=True)
    command = parse_command([script])
    with pytest.raises(ConfigError, match=rf"{script} is not in it.* --ship={above}, or change"):
        in_tree(command, cwd, cwd)
    proposed = (cwd / above).resolve()
    assert in_tree(command, proposed, cwd) == command
