"""Keys of the terminal: in a process that has a real one, and for a rank on another host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from ringrun.job import keyboard
from ringrun.job.keyboard import RemoteTerminal
from ringrun.job.launch import prepare
from ringrun.plan.debug import Debugged
from ringrun.plan.job import Job
from ringrun.plan.options import Options
from ringrun.reach import doors
from ringrun.show.console import Console

LIMIT_S = 60.0
PROGRAM = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from ringcomm.clock import monotonic
from ringrun.job.event_loop import Loop
from ringrun.job.keyboard import Keys

typed = []
loop = Loop(monotonic)
keys = Keys(loop, typed.append)
keys.start()
print(keys.active, flush=True)
while keys.active and b"q" not in b"".join(typed):
    loop.run_once(60.0)
keys.stop()
keys.stop()
print(b"".join(typed).decode(), keys.active, flush=True)
"""


class Terminal:
    """A pseudo-terminal, and the process that reads from it."""

    def __init__(self) -> None:
        self.controlling, self.terminal = os.openpty()
        self.modes: List[Any] = termios.tcgetattr(self.terminal)
        self.process: Any = None

    def start(self, owns: bool = True) -> None:
        """Start the program, with the terminal as that of its session if it ``owns`` it."""
        take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=self.terminal, stdout=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=take if owns else None,
        )  # fmt: skip

    def line(self) -> str:
        text: str = self.process.stdout.readline()
        return text

    def hang_up(self) -> None:
        """The window is closed."""
        for descriptor in (self.controlling, self.terminal):
            os.close(descriptor)
        self.controlling = self.terminal = -1

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        if self.controlling >= 0:
            self.hang_up()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.end()


def test_keys_are_read_as_they_are_typed(terminal: Terminal) -> None:
    terminal.start()
    assert terminal.line() == "True\n"
    modes: List[Any] = termios.tcgetattr(terminal.terminal)
    assert not modes[3] & termios.ICANON and modes[3] & termios.ISIG, "Ctrl-C keeps its meaning"
    os.write(terminal.controlling, b"sq")  # without a line end
    assert terminal.line() == "sq False\n"
    assert terminal.process.wait(LIMIT_S) == 0
    assert termios.tcgetattr(terminal.terminal)[3] == terminal.modes[3], "it is as it was"


def test_a_window_that_is_closed_ends_it(terminal: Terminal) -> None:
    terminal.start()
    assert terminal.line() == "True\n"
    terminal.hang_up()
    assert terminal.line() == " False\n"
    assert terminal.process.wait(LIMIT_S) == 0


def test_a_terminal_of_another_session_is_left_alone(terminal: Terminal) -> None:
    terminal.start(owns=False)
    assert terminal.line() == "False\n"
    assert termios.tcgetattr(terminal.terminal)[3] == terminal.modes[3]
    assert terminal.line() == " False\n"
    assert terminal.process.wait(LIMIT_S) == 0


def test_without_a_terminal_there_are_no_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n False\n"


# ---- the rank of --debug ----------------------------------------------------------------------------


class Keys:
    """In place of the terminal's keys: a test types."""

    def __init__(self, loop: object, take: Callable[[bytes], None]) -> None:
        self.type = take
        self.events: List[str] = []

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")


class Kept(Console):
    def __init__(self) -> None:
        self.written: List[Tuple[int, bytes]] = []

    def write(self, stream: int, data: bytes) -> None:
        self.written.append((stream, data))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of two hosts with a rank each."""
    monkeypatch.setattr(keyboard, "Keys", Keys)
    monkeypatch.setattr(doors, "find_local", lambda specs, **_: [False] * len(specs))
    return prepare(Options(hosts="a,b"), ["true"])


def remote(job: Job, console: Console, **link: bool) -> Tuple[Any, List[List[Dict[str, Any]]]]:
    """The terminal, and what is sent to each host's agent."""
    sent: List[List[Dict[str, Any]]] = [[], []]
    state = {"answered": True, "alive": True, **link}
    links: Any = [SimpleNamespace(send=commands.append, **state) for commands in sent]
    return RemoteTerminal(job, links, None, console), sent  # type: ignore[arg-type]


def test_what_is_typed_goes_to_the_host_of_the_rank(job: Job) -> None:
    console = Kept()
    made, sent = remote(replace(job, debug=Debugged(1, "", "xterm", 80, 24)), console)
    made.start()
    made._keys.type(b"p x\xff\n")
    assert sent == [[], [{"do": "type", "text": "p x\xff\n"}]], "each byte is a character"
    assert made.shows(1, b"(Pdb) ") and not made.shows(0, b"step 1\n")
    assert [data for _, data in console.written] == [b"(Pdb) "]
    made.stop()
    assert made._keys.events == ["start", "stop"]


@pytest.mark.parametrize("link", [{"answered": False}, {"alive": False}])
def test_what_is_typed_before_or_after_the_agent_runs_is_dropped(job: Job, link: Dict[str, bool]) -> None:
    made, sent = remote(replace(job, debug=Debugged(0, "", "xterm", 80, 24)), Kept(), **link)
    made._keys.type(b"p x\n")
    assert sent == [[], []]


@pytest.mark.parametrize("debugged", [None, Debugged(0, "/dev/pts/7", "", 80, 24)])
def test_a_rank_that_has_the_terminal_itself_needs_no_help(job: Job, debugged: Any) -> None:
    console = Kept()
    made, _ = remote(replace(job, debug=debugged), console)
    made.start()
    assert made._keys.events == [] and not made.shows(0, b"x") and console.written == []
