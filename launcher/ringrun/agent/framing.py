"""The frames between the launcher and an agent, by kind and length, and the agent's output in them.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, and uses the formats
itself (:mod:`ringrun.reach.protocol`). Frames are written as stdout accepts them. While too much is unsent,
the ranks' pipes are not read.
"""

from __future__ import annotations

import json
import os
import selectors
import struct
from typing import Any, Callable, Dict, Tuple

from ringrun.agent import processes

MARKER = b"\nringrun-agent/1\n"
TO_LAUNCHER = struct.Struct("!BiI")  # kind, rank, length
FRAME_END = b"\n"  # srun passes output on line by line
TO_AGENT = struct.Struct("!BQ")  # kind, length
STDOUT, STDERR, RESULT, EVENT, RECORD, FILE, NUMBERS = 1, 2, 3, 4, 5, 6, 7
JSON, PAYLOAD, PACKAGE, CODE, PROGRAM = 1, 2, 3, 4, 5  # PROGRAM: this one, see reach/protocol.py
CHECK = -1  # in place of a rank: the trial import before the ranks start
PAUSE_BYTES, RESUME_BYTES = 1 << 20, 1 << 18  # unsent bytes: above, ranks' output is not read; below, again


def read_frame() -> bytes:
    """Return the content of the next frame on stdin."""
    return processes.read_exactly(TO_AGENT.unpack(processes.read_exactly(TO_AGENT.size))[1])


class Output:
    """The unsent frames, and the pipes from which ranks' output is read. `gone` is called if stdout is
    closed, that is, if the launcher is lost; then nothing is sent any more.
    """

    def __init__(self, selector: selectors.BaseSelector, gone: Callable[[], None]) -> None:
        self._selector = selector
        self._gone = gone
        self.unsent = bytearray()
        self.pipes: Dict[int, Tuple[int, int]] = {}  # by descriptor: frame kind, rank
        self.paused = self.lost = False
        self.check_output = bytearray()

    def close(self) -> None:
        """Stop sending because the launcher is lost; pipes are still read."""
        self.lost = True
        self.unsent.clear()
        self._resume()

    def add(self, descriptor: int, kind: int, rank: int) -> None:
        """Forward the output of a pipe from now on, as frames of this kind."""
        os.set_blocking(descriptor, False)
        self.pipes[descriptor] = (kind, rank)
        if not self.paused:
            self._watch(descriptor)

    def event(self, name: str, rank: int = -1, **facts: Any) -> None:
        """Send an event of a rank, or of the whole host."""
        self.send(EVENT, rank, json.dumps(dict(facts, event=name)).encode())

    def send(self, kind: int, rank: int, data: bytes) -> None:
        """Append a frame to the unsent bytes."""
        if not self.lost:
            self.unsent += TO_LAUNCHER.pack(kind, rank, len(data)) + data + FRAME_END
            if len(self.unsent) > PAUSE_BYTES and not self.paused:
                self.paused = True
                for descriptor in self.pipes:
                    self._selector.unregister(descriptor)

    def flush(self) -> None:
        """Write what stdout accepts; wait for it to become writable only while bytes are unsent."""
        try:
            while self.unsent and not self.lost:
                del self.unsent[: os.write(1, bytes(self.unsent[:65536]))]
        except BlockingIOError:
            pass
        except OSError:
            self._gone()
        watched = 1 in self._selector.get_map()
        if self.unsent and not watched:
            self._selector.register(1, selectors.EVENT_WRITE, self.flush)
        elif watched and not self.unsent:
            self._selector.unregister(1)
        if self.paused and len(self.unsent) < RESUME_BYTES:
            self._resume()

    def _resume(self) -> None:
        if self.paused:
            self.paused = False
            for descriptor in self.pipes:
                self._watch(descriptor)

    def _watch(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self.read(descriptor))

    def read(self, descriptor: int) -> bool:
        """Forward one chunk; return whether there may be more."""
        if descriptor not in self.pipes:
            return False
        kind, rank = self.pipes[descriptor]
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that no process has open
            data = b""
        if not data:
            del self.pipes[descriptor]
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        elif rank == CHECK:
            self.check_output += data
        else:
            self.send(kind, rank, data)
        return bool(data)
