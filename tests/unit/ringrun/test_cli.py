from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import click
import pytest
from click.testing import CliRunner

from ringcomm.config import Settings, tunables
from ringcomm.errors import ConfigError
from ringcomm.version import __version__
from ringrun import cli, commands
from ringrun.flags import document
from ringrun.job.launch import effective_settings, read_hosts
from ringrun.plan.environment import HOROVOD_SETTINGS
from ringrun.plan.options import Options


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> List[Tuple[Options, Tuple[str, ...], bool]]:
    """Return what the command line was understood as, instead of running it."""
    found: List[Tuple[Options, Tuple[str, ...], bool]] = []
    monkeypatch.setattr(
        cli, "_run", lambda options, command, dry_run: found.append((options, command, dry_run))
    )
    return found


@pytest.mark.parametrize(
    ("line", "options", "command"),
    [
        ("train.py -np 3 --help", {}, ("train.py", "-np", "3", "--help")),
        ("-np 2 -m pkg.mod -x", {"np": 2}, ("-m", "pkg.mod", "-x")), ("-m pkg.mod", {}, ("-m", "pkg.mod")),
        ("-np 2 -x A -x B=1 sh -c true", {"np": 2, "forward": ("A", "B=1")}, ("sh", "-c", "true")),
        ("-x -m train.py", {"forward": ("-m",)}, ("train.py",)),
        ("--num-proc=2 -H a,b --verbose -m m", {"np": 2, "hosts": "a,b", "verbose": True}, ("-m", "m")),
        ("-hostfile f x.py", {"hostfile": "f"}, ("x.py",)),
        ("--hostfile f -- x.py", {"hostfile": "f"}, ("x.py",)),
        ("-p 22 -i key --ssh s x", {"ssh": "s", "ssh_port": 22, "ssh_identity_file": "key"}, ("x",)),
        ("--output-filename d --horovod x", {"output_dir": "d", "horovod": True}, ("x",)),
        ("--network-interface e0 --network-interface e1 x", {"iface": ("e0,e1",)}, ("x",)),
        ("--gloo --disable-cache --no-hierarchical-allreduce x", {}, ("x",)),
        (
            "--python a=/p --cwd /c --iface e x", {"python": ("a=/p",), "cwd": ("/c",), "iface": ("e",)},
            ("x",),
        ),
    ],
)
def test_lines(seen: List[Any], line: str, options: Dict[str, Any], command: Tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.ringrun, line.split())
    assert result.exit_code == 0, result.output
    assert seen == [(Options(**options), command, False)]


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("--late-after 1.5 --start-timeout 2", {"late_after_s": 1.5, "start_timeout_s": 2.0}),
        ("--fusion-threshold 3M --transport=tcp", {"fusion_bytes": 3 << 20, "transport": "tcp"}),
        ("--fusion-threshold-mb 3 --cycle-time-ms 3.5 --verbose", {"fusion_bytes": 3 << 20, "verbose": True}),
        ("--iface eth0 --encrypt", {"iface": "eth0", "encrypt": True}),
    ],
)
def test_settings(seen: List[Any], line: str, changes: Dict[str, Any]) -> None:
    result = CliRunner().invoke(cli.ringrun, [*line.split(), "x", "--late-after", "9"])
    assert result.exit_code == 0, result.output
    ((options, command, _),) = seen
    assert effective_settings(options, {}, dict(zip([None], options.iface))).settings == Settings(**changes)
    assert command == ("x", "--late-after", "9")


@pytest.mark.parametrize(
    ("line", "subcommand"),
    [
        ("-H a,b doctor --json", "doctor -H a,b --json"), ("--help stop", "stop --help"),
        ("stop --job 7", "stop --job 7"), ("--job=7 add host", "add --job=7 host"),
        ("-n 2 doctor", "doctor -np 2"),  # mpirun's option
        ("-np 2 -- stop", ""),
        ("-np 2 -m stop", ""), ("-np 2 ./stop", ""), ("-np 2 train.py stop", ""), ("-H stop", ""), ("", ""),
    ],
)
def test_options_come_before_a_subcommand_or_after_it(line: str, subcommand: str) -> None:
    words = line.split()
    assert list(cli._subcommand_first(words)) == (subcommand.split() or words)


def test_a_dry_run_shows_the_settings_with_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RINGCOMM_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RINGCOMM_LATE_AFTER", "5")
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    line = ["--dry-run", "--fusion-threshold-mb", "2", "-np", "2", "--horovod", "true"]
    result = CliRunner().invoke(cli.ringrun, line)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-4:] == [
        "settings:", "  fusion-threshold 2M, by --fusion-threshold",
        "  late-after 5, by RINGCOMM_LATE_AFTER", "  timeline t.json, by HOROVOD_TIMELINE",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["-np x a", "-np 0 a", "--nope a", "-p 0 a", "--late-after -1 a", "--fusion-threshold-mb x a", "-np"],
)
def test_bad_lines(seen: List[Any], line: str) -> None:
    result = CliRunner().invoke(cli.ringrun, line.split())
    assert result.exit_code == 2 and not seen
    assert "Error" in result.output


def test_version() -> None:
    assert CliRunner().invoke(cli.ringrun, ["-v"]).output.startswith(f"ringrun {__version__}, Python ")


def test_check_build() -> None:
    result = CliRunner().invoke(cli.ringrun, ["--check-build"])
    assert result.exit_code == 0
    for line in [
        "Available Frameworks:", "Available Controllers:", "    [ ] MPI", "    [X] Gloo", "    [X] NumPy",
    ]:
        assert line in result.output


def test_check_build_on_hosts_is_one_rank_on_each(seen: List[Any]) -> None:
    result = CliRunner().invoke(cli.ringrun, ["--check-build", "-np", "3", "-H", "a:2,b,a"])
    assert result.exit_code == 0
    ((options, command, _),) = seen
    assert [(spec.name, spec.slots) for spec in read_hosts(options)] == [("a", 1), ("b", 1)]
    assert options.np is None and command[0] == "-m"


def test_the_pages_name_every_option() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page, horovods = (docs / "ringrun.md").read_text(), (docs / "horovod.md").read_text()
    settings = {item.metadata["flag"] for item in tunables()}
    wanted = {name for param in cli.ringrun.params if isinstance(param, click.Option) for name in param.opts}
    assert sorted(name for name in wanted - settings if f"`{name}" not in page + horovods) == []
    command = "from ringrun import cli, flags; print(flags.document(cli.ringrun))"
    assert document(cli.ringrun) in page, f"put this into the page: python -c '{command}'"
    assert [variable for variable in HOROVOD_SETTINGS if f"`{variable}`" not in horovods] == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["ps"], 0, "No job of yours"), (["ps", "x"], 2, "Usage: ringrun ps"),
        (["stop"], 1, "No job of yours"), (["stop", "--help"], 0, "Usage: ringrun stop"),
        (["stop", "--job", "7", "8"], 2, "The job is named twice"),
        (["add", "a", "b", "c"], 2, "Name one host, after the job"),
        (["add", "a:2"], 1, "No elastic job of yours"), (["drop", "7", "a"], 1, "No job of yours"),
        (["diagnose", "/no/such/folder"], 2, "/no/such/folder"), (["-h"], 0, "Subcommands:"),
        (["completion", "zsh"], 0, "_RINGRUN_COMPLETE"),
    ],
)
def test_commands_beside_running_a_job(
    words: List[str], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    out, err = capsys.readouterr()
    assert caught.value.code == code and text in (err if code else out), (out, err)


@pytest.mark.parametrize(("given", "agreed"), [("y\n", True), ("n\n", False), ("\n", False), ("", None)])
def test_the_only_job_is_ended_after_a_question(
    given: str, agreed: Optional[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.StringIO(given)
    monkeypatch.setattr(stdin, "isatty", lambda: bool(given))
    monkeypatch.setattr(sys, "stdin", stdin)
    if agreed is None:  # no terminal
        with pytest.raises(ConfigError, match="1 job runs: 7ab .train.py.. Name it as in `ringrun stop 7ab`"):
            commands._agreed("7ab", "train.py")
    else:
        assert commands._agreed("7ab", "train.py") is agreed
        assert "End 7ab (train.py)? [y/N]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--hostfile", "\x1b[2J", "x"], ["--dry-run", "-np", "1", "/\x1b[2Jx"]], ids=["error", "plan"]
)
def test_what_is_shown_of_names_is_visible(words: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\\x1b[2J" in out + err


def test_completion_offers_commands_and_files() -> None:
    context = click.Context(cli.ringrun)
    argument = next(param for param in cli.ringrun.params if param.name == "command")
    found = argument.shell_complete(context, "d")
    assert [item.value for item in found] == ["diagnose", "doctor", "drop", "d"]
    assert found[-1].type == "file"
    context.args = ["train.py"]
    assert [item.value for item in argument.shell_complete(context, "d")] == ["d"]
