"""From options to the exit code: what the command line does around the attempts to run a job."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Tuple

import pytest
from click.testing import CliRunner

from ringcomm.errors import ConfigError, RingcommError
from ringrun import cli
from ringrun.cli import misplaced_options
from ringrun.job import supervise
from ringrun.job.outcome import Outcome
from ringrun.plan.job import parse_command
from ringrun.show import output as console_module

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Kept:
    """Replaces the console on descriptors 1 and 2; keeps its output and when it was closed."""

    made: List[Kept] = []
    problem = ""

    def __init__(self) -> None:
        self.events: List[Tuple[Any, ...]] = []
        Kept.made.append(self)

    def write(self, stream: int, data: bytes) -> None:
        self.events.append((stream, data))

    def close(self, timeout_s: Optional[float]) -> None:
        self.events.append(("close", timeout_s))


class Attempts:
    """Replaces the attempts to run a job; the test sets the outcome. `received` has signals and requests."""

    outcome = Outcome(0, "", "done")
    during: Callable[[Attempts], None] = lambda self: None

    def __init__(self, job: Any, count: int, console: Any) -> None:
        self.job, self.count, self.console, self.signum = job, count, console, 0
        self.received: List[Any] = []
        made.append(self)

    def run(self) -> Outcome:
        type(self).during(self)
        return type(self).outcome

    def interrupt(self, signum: int) -> None:
        self.signum = signum
        self.received.append(signum)

    def diagnose(self) -> None:
        self.received.append("diagnose")


made: List[Attempts] = []


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No job is run, and handlers of signals are as before in the end."""
    monkeypatch.setattr(console_module, "DescriptorConsole", Kept)
    monkeypatch.setattr(supervise, "Attempts", Attempts)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made.clear()
    Kept.made.clear()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run(outcome, *words, during)`: the exit code of a command line whose job goes like this."""

    def execute(
        outcome: Outcome, *words: str, during: Callable[[Attempts], None] = lambda attempts: None
    ) -> Any:
        monkeypatch.setattr(Attempts, "outcome", outcome)
        monkeypatch.setattr(Attempts, "during", during)
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as caught:
            patched.setattr(sys, "stdout", io.StringIO())
            try:
                cli.main([*words, "true"])
            finally:
                later: Any = sys.stdout
                assert later.name == os.devnull, "what is printed later has no reader"
                later.close()
        return caught.value.code

    return execute


def test_the_exit_code_is_that_of_the_job(run: Callable[..., Any]) -> None:
    assert run(Outcome(0, "", "done")) == 0
    assert run(Outcome(7, "a box\n", "failure"), "--restarts", "2") == 7
    assert [attempts.count for attempts in made] == [0, 2]
    assert [console.events for console in Kept.made] == [
        [("close", None)], [(2, b"a box\n"), ("close", None)]
    ]  # fmt: skip


@pytest.mark.parametrize(("reason", "code"), [("interrupt", 130), ("pipe", 141)])
def test_after_an_interruption_the_output_is_not_waited_for(
    run: Callable[..., Any], reason: str, code: int
) -> None:
    assert run(Outcome(code, "", reason)) == code
    assert Kept.made[0].events == [("close", cli.FLUSH_S)]


@pytest.mark.parametrize("number", [*SIGNALS, None])
def test_signals_reach_the_job_but_a_closed_terminal_not_under_nohup(
    run: Callable[..., Any], number: Optional[signal.Signals]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL if number else signal.SIG_IGN)
    during = lambda attempts: signal.raise_signal(number or signal.SIGHUP)  # noqa: E731
    assert run(Outcome(0, "", "done"), during=during) == 0
    assert made[0].received == (["diagnose"] if number == signal.SIGUSR1 else [number] if number else [])


@pytest.mark.parametrize(("problem", "code"), [(ConfigError("no host"), 2), (RingcommError("no port"), 1)])
def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, problem: RingcommError, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(cli, "_run", fail)
    result = CliRunner().invoke(cli.ringrun, ["train.py"])
    assert result.exit_code == code and result.output == f"ringrun: {problem}\n"


def test_an_option_after_the_script_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    with pytest.raises(SystemExit):
        cli.main(["--dry-run", "-np", "2", str(script), "--watch", "--gloo"])
    line = f"ringrun: --watch is after {script}, so that gets it; options of ringrun come before it\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("words", "text", "found"),
    [
        (["train.py", "--watch"], "print(1)", ["--watch"]),
        (["python", "train.py", "--output-dir=x", "--watch", "--watch"], "", ["--output-dir", "--watch"]),
        (["train.py", "-np", "3", "-H", "a,b"], "sys.argv", ["-np", "-H"]),
        (["train.py", "-H", "a"], "parser.add_argument('-H', '--height')", []), (["train.py", "-x"], "", []),
        (["train.py", "--", "--watch"], "", []),
        (["train.py", "--watch"], 'parser.add_argument("--watch")', []),
        (["train.py", "--output-dir", "x"], "class Arguments:\n    output_dir: str", []),
        (["-m", "pkg.train", "--watch"], "", []),
    ],
)
def test_options_of_ringruns_after_the_script(
    words: List[str], text: str, found: List[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    assert misplaced_options(parse_command(words), {"--watch", "--output-dir", "-np", "-H"}) == found
