"""``ringrun.toml``: which file is used, what it may have, and what the command line replaces."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Optional, Tuple

import pytest
from click.testing import CliRunner, Result

from ringrun import cli, project
from ringrun.job.launch import effective_settings
from ringrun.plan.options import Options

HAS_TOML = sys.version_info >= (3, 11) or project.find_spec("tomli") is not None
pytestmark = pytest.mark.skipif(not HAS_TOML, reason="TOML needs Python 3.11 or tomli")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, two below that of the file."""
    tmp_path.chmod(0o755)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> List[Options]:
    found: List[Options] = []
    monkeypatch.setattr(cli, "_run", lambda options, command, dry_run: found.append(options))
    return found


def run(folder: Path, content: str, *words: str) -> Result:
    (folder / project.NAME).write_text(content)
    return CliRunner().invoke(cli.ringrun, [*words, "train.py"])


def test_options_come_from_the_nearest_file_above(folder: Path, seen: List[Options]) -> None:
    (folder / "a" / project.NAME).write_text('np = 3\nhosts = ["a", "b:2"]\nship = true\nx = ["A=1", "B"]\n')
    result = run(folder, "np = 9", "--restarts", "2")
    assert seen == [Options(np=3, hosts="a,b:2", ship=".", forward=("A=1", "B"), restarts=2)]
    assert seen[0].project_names == ("np", "hosts", "ship", "forward")
    path = folder / "a" / project.NAME
    assert f"ringrun: options of {path} are used: np, hosts, ship, x; --no-project-file" in result.output


@pytest.mark.parametrize(
    ("words", "sent"), [(["--ship"], "."), (["--ship=.."], ".."), (["--ship=..", "--ship"], "."), ([], None)]
)
def test_the_value_of_a_switch_follows_an_equals_sign(
    folder: Path, seen: List[Options], words: List[str], sent: Optional[str]
) -> None:
    assert run(folder, "", *words).exit_code == 0
    run(folder, f'ship = "{sent}"' if sent else "ship = false")
    relative = str(folder / sent) if sent else None
    assert [options.ship for options in seen] == [sent, relative]


def test_paths_are_relative_to_the_file(folder: Path, seen: List[Options]) -> None:
    run(folder, 'hostfile = "hosts"\noutput-dir = "/out"\ntimeline = "t.json"\nssh_identity_file = "~/key"')
    (options,) = seen
    assert options.hostfile == str(folder / "hosts") and options.output_dir == "/out"
    assert options.ssh_identity_file == str(Path("~/key").expanduser())
    assert [value.text for value in options.project_values] == [str(folder / "t.json")]


def test_settings_of_the_file_come_after_all_others(folder: Path, seen: List[Options]) -> None:
    run(folder, "late-after = 1.5\nthreads = 3\nadvise = true\n", "--threads", "4")
    found = effective_settings(seen[0], {"RINGCOMM_LATE_AFTER": "9"}, {})
    assert (found.settings.late_after_s, found.settings.threads) == (9.0, "4")
    assert found.settings.advise and found.sources["advise"] == str(folder / project.NAME)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("nop = 1", "ringrun has no option 'nop' for a project. Did you mean np?"),
        ("[job]\nnp = 1", "no option 'job'"), ("dry-run = true", "no option 'dry-run'"),
        ("np = true", "np = True is not of the form N"), ("horovod = 1", "horovod = 1 is not true or false"),
        ('np = "x"', "'x' is not a valid whole number"), ("np = [1, 2]", "np takes one value, not a list"),
        ("x = [true]", "x = [True] is not of the form"), ('compress = "zip"', "'zip' cannot be used"),
        ("np", "Expected '='"),
    ],
)
def test_what_is_not_valid_is_refused_with_the_file(
    content: str, text: str, folder: Path, seen: List[Options]
) -> None:
    result = run(folder, content)
    assert result.exit_code == 2 and not seen
    assert f"ringrun: {folder / project.NAME}: " in result.output and text in result.output, result.output


@pytest.mark.parametrize("what", ["file", "folder", "binary", "link", "fifo"])
def test_a_file_that_others_could_change_is_not_used(what: str, folder: Path, seen: List[Options]) -> None:
    path = folder / project.NAME
    if what == "binary":
        path.write_bytes(b"\xff\xfe")
        assert "is not a text file" in CliRunner().invoke(cli.ringrun, ["x"]).output
        return
    if what in ("file", "folder"):
        path.write_text("np = 3")
        (path if what == "file" else folder).chmod(0o777)
    elif what.startswith("link"):
        path.symlink_to(folder / "kept.toml")
    else:
        os.mkfifo(path)
    result = CliRunner().invoke(cli.ringrun, ["x"])
    assert f"ringrun: {path} is not used: " in result.output and "(chmod go-w)." in result.output
    assert seen == [Options()]


def test_the_doctor_uses_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringrun.doctor import report

    found: List[Tuple[Options, bool]] = []

    def run_doctor(options: Options, as_data: bool) -> Tuple[str, int]:
        found.append((options, as_data))
        return "", 0

    monkeypatch.setattr(report, "run_doctor", run_doctor)
    (folder / project.NAME).write_text('hosts = "a"\nship = true\nlate-after = 3\n')
    for words in ([], ["-H", "b"], ["--no-project-file"]):
        with pytest.raises(SystemExit):
            cli.main(["doctor", *words])
    assert [options.hosts for options, _ in found] == ["a", "b", None]
    assert [options.ship for options, _ in found] == [".", ".", None]


PROGRAMS = ('via = "sh evil {host}"', 'ssh = "./evil"', 'host-discovery-script = "evil"')


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`terminal(is_one)`: whether there is a terminal; what is allowed is kept in a folder of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def choose(is_one: bool) -> None:
        stream = SimpleNamespace(isatty=lambda: is_one)
        monkeypatch.setattr(project, "sys", SimpleNamespace(stdin=stream, stderr=stream))

    return choose


@pytest.mark.parametrize("content", PROGRAMS)
def test_without_a_terminal_it_starts_no_program(
    folder: Path, seen: List[Options], terminal: Any, content: str
) -> None:
    terminal(False)
    result = run(folder, f"{content}\nverbose = true")
    assert result.exit_code == 2 and seen == []
    assert "are used: " in result.output and "starts programs on this machine: " in result.output
    assert run(folder, 'via = "ssh"').exit_code == 0, "that is no program of the file's"
    assert run(folder, content, "-H", "a", "--via", "v", "--ssh", "s").exit_code == 0, "the user's own"


def test_its_programs_are_asked_about_once_for_each_content(
    folder: Path, seen: List[Options], terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(True)
    asked: List[str] = []
    answers = [False, True, True]

    def confirm(text: str, err: bool) -> bool:
        asked.append(text)
        return answers.pop(0)

    monkeypatch.setattr(project.click, "confirm", confirm)
    assert run(folder, PROGRAMS[0]).exit_code == 2 and seen == []
    assert run(folder, PROGRAMS[0]).exit_code == 0 and run(folder, PROGRAMS[0]).exit_code == 0
    assert run(folder, PROGRAMS[1]).exit_code == 0 and len(asked) == 3
    terminal(False)
    assert run(folder, PROGRAMS[0]).exit_code == 0, "allowed before"
    shown = "starts programs on this machine: via = 'sh evil {host}'. Allow it?"
    assert asked[0] == f"{folder / project.NAME} {shown}"
    (kept,) = (folder / "config" / "ringcomm").iterdir()
    kept.chmod(0o777)
    assert run(folder, PROGRAMS[0]).exit_code == 2, "another user may have written it"
