"""Reads the terminal on stdin key by key: for the live view, and for the rank of ``--debug``."""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from typing import Any, Callable, List, Optional, Sequence

from ..plan.job import Job
from ..reach.agent_process import AgentLink
from ..show.console import Console
from ..show.printer import STDERR, STDOUT
from .event_loop import READ, Loop


class Keys:
    """Reads keys from the terminal on stdin as they are typed. Ctrl-C and Ctrl-Z keep their meaning.

    Args:
        loop: the event loop.
        take: called with what was typed.

    Attributes:
        active: whether keys are read.
    """

    def __init__(self, loop: Loop, take: Callable[[bytes], None]) -> None:
        self._loop, self._take = loop, take
        self._before: Optional[List[Any]] = None
        self.active = False

    def start(self) -> None:
        """Read keys, if stdin is a terminal that belongs to this process."""
        try:
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                self._before = termios.tcgetattr(0)
                tty.setcbreak(0, termios.TCSADRAIN)
                self._loop.watch(0, READ, self._read)
                self.active = True
        except (OSError, termios.error):
            pass  # without a terminal there are no keys

    def _read(self) -> None:
        try:
            data = os.read(0, 1024)
        except OSError:
            data = b""
        if data:
            self._take(data)
        else:
            self.stop()

    def stop(self) -> None:
        """Give the terminal back as it was."""
        if self.active:
            self.active = False
            self._loop.forget(0)
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._before or [])


class RemoteTerminal:
    """The user's terminal for the rank of ``--debug``, if that runs on another host.

    Args:
        job: the job.
        links: to the agents.
        loop: the supervisor's.
        console: what the rank writes goes there, without a prefix.
    """

    def __init__(self, job: Job, links: Sequence[AgentLink], loop: Loop, console: Console) -> None:
        self._job, self._links, self._console = job, links, console
        debugged = job.debug
        self._rank = debugged.rank if debugged is not None and not debugged.device else -1
        self._keys = Keys(loop, self._typed)

    def start(self) -> None:
        """Begin to read the terminal, if a rank of another host gets it."""
        if self._rank >= 0:
            self._keys.start()

    def _typed(self, data: bytes) -> None:
        link = self._links[self._job.host_of(self._rank).index]
        if link.answered and link.alive:
            link.send({"do": "type", "text": data.decode("latin-1")})

    def shows(self, rank: int, data: bytes) -> bool:
        """Write what this rank has written, if it has the terminal; whether it has.

        Args:
            rank: the rank.
            data: what it has written to its stdout or stderr.
        """
        if rank == self._rank:
            self._console.write(STDOUT if os.isatty(STDOUT) else STDERR, data)
        return rank == self._rank

    def stop(self) -> None:
        """Give the terminal back as it was."""
        self._keys.stop()
