"""Reads the terminal on stdin key by key, for the live view."""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from typing import Any, Callable, List, Optional

from .event_loop import READ, Loop


class Keys:
    """Reads keys from the terminal on stdin as they are typed. Ctrl-C and Ctrl-Z keep their meaning."""

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
            pass  # no terminal

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
        """Restore the terminal's modes."""
        if self.active:
            self.active = False
            self._loop.forget(0)
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._before or [])
