from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
from click.testing import CliRunner

from ringrun import cli
from ringrun.launch import Options
from ringrun.ssh import SshOptions


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> List[Tuple[Options, Tuple[str, ...], bool]]:
    """What the command line was understood as, instead of running it."""
    found: List[Tuple[Options, Tuple[str, ...], bool]] = []
    monkeypatch.setattr(
        cli, "_run", lambda options, command, dry_run: found.append((options, command, dry_run))
    )
    return found


@pytest.mark.parametrize(
    ("line", "options", "command"),
    [
        ("train.py -np 3 --help", {}, ("train.py", "-np", "3", "--help")),
        ("-np 2 -m pkg.mod -x", {"np": 2}, ("-m", "pkg.mod", "-x")),
        ("-m pkg.mod", {}, ("-m", "pkg.mod")),
        ("-np 2 -x A -x B=1 sh -c true", {"np": 2, "forward": ("A", "B=1")}, ("sh", "-c", "true")),
        ("-x -m train.py", {"forward": ("-m",)}, ("train.py",)),
        ("--num-proc=2 -H a,b --verbose -m m", {"np": 2, "hosts": "a,b", "verbose": True}, ("-m", "m")),
        ("-hostfile f x.py", {"hostfile": "f"}, ("x.py",)),
        ("--hostfile f -- x.py", {"hostfile": "f"}, ("x.py",)),
        ("-p 22 -i key --ssh s x", {"ssh": SshOptions("s", 22, "key")}, ("x",)),
        ("--timeout 1.5 --start-timeout 2 x", {"timeout_s": 1.5, "start_timeout_s": 2.0}, ("x",)),
        (
            "--python a=/p --cwd /c --iface e x",
            {"pythons": ("a=/p",), "cwds": ("/c",), "ifaces": ("e",)},
            ("x",),
        ),
    ],
)
def test_lines(seen: List[Any], line: str, options: Dict[str, Any], command: Tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.ringrun, line.split())
    assert result.exit_code == 0, result.output
    assert seen == [(Options(**options), command, False)]


@pytest.mark.parametrize("line", ["-np x a", "-np 0 a", "--nope a", "-p 0 a", "--timeout 0 a", "-np"])
def test_bad_lines(seen: List[Any], line: str) -> None:
    result = CliRunner().invoke(cli.ringrun, line.split())
    assert result.exit_code == 2 and not seen
    assert "Error" in result.output


def test_version() -> None:
    assert CliRunner().invoke(cli.ringrun, ["--version"]).output.startswith("ringrun 0.")
