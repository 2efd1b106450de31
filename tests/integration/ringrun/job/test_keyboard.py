"""Keys of the terminal, in a process that has a real one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from typing import Any, Iterator, List

import pytest

LIMIT_S = 60.0
PROGRAM = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from ringcomm.clock import monotonic
from ringrun.job.event_loop import Loop
from ringrun.job.observing import Keys

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
