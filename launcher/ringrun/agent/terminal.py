"""The terminal of the rank that ``--debug`` names: the user's own, or a pseudo-terminal on another host.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. On another host the agent
forwards what the rank writes as output of that rank, and the launcher sends what the user types.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import termios
from typing import Any, Dict, Sequence


class Terminal:
    """The terminal of one rank.

    Args:
        given: of :class:`ringrun.plan.debug.Debugged`, as a list; empty if no rank gets a terminal.
        selector: the agent's, for keys that the pseudo-terminal does not accept at once.
    """

    def __init__(self, given: Sequence[Any], selector: selectors.BaseSelector) -> None:
        self._given = given
        self._selector = selector
        self._descriptor = -1
        self._typed = bytearray()

    def attach(self, rank: int, ends: Sequence[int], out: int, env: Dict[str, str]) -> None:
        """Make the terminal a rank's stdin, stdout and stderr; for other ranks nothing changes.

        Args:
            rank: the rank that is about to start.
            ends: the descriptors for its stdin, stdout and stderr, which become duplicates of the terminal.
            out: the descriptor from which its stdout is read. It becomes the controlling end of a
                pseudo-terminal; if the rank has the user's own terminal, it is at its end at once.
            env: the rank's environment, which gets the kind of a pseudo-terminal.
        """
        if not self._given or rank != self._given[0]:
            return
        _, device, kind, columns, rows = self._given
        if device:
            terminal = os.open(device, os.O_RDWR | os.O_NOCTTY)
        else:
            controlling, terminal = os.openpty()
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            modes = termios.tcgetattr(terminal)
            modes[1] &= ~termios.OPOST  # the user's terminal translates line ends
            termios.tcsetattr(terminal, termios.TCSANOW, modes)
            env["TERM"] = kind
            os.dup2(controlling, out)
            self._descriptor = controlling
            os.set_blocking(controlling, False)
        for end in ends:
            os.dup2(terminal, end)
        os.close(terminal)
        self._write()

    def type(self, text: str) -> None:
        """The user has typed something.

        Args:
            text: one character per byte.
        """
        self._typed += text.encode("latin-1")
        self._write()

    def _write(self) -> None:
        if self._descriptor < 0:
            return
        try:
            while self._typed:
                del self._typed[: os.write(self._descriptor, bytes(self._typed[:1024]))]
        except BlockingIOError:
            pass
        except OSError:  # the rank has ended
            self._typed.clear()
        watched = self._descriptor in self._selector.get_map()
        if self._typed and not watched:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._write)
        elif watched and not self._typed:
            self._selector.unregister(self._descriptor)
