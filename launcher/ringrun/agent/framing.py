"""The frames between the launcher and an agent; the ranks' output and flight records, which the agent sends.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, and uses the formats
itself (:mod:`ringrun.reach.protocol`). Frames are written as stdout accepts them. While too much is unsent,
the ranks' pipes are not read.

Every rank reports its state on a flight recorder socket. One that uses ringcomm answers a request from a
separate thread. If it does not answer, the agent sends SIGUSR1, but only if the rank has reported that its
handler writes its stacks and does nothing else. Stacks have a separate pipe: the handler acquires no lock, so
on the socket its text could be inserted into an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import time
from typing import Any, Callable, Dict, Optional, Tuple

from ringrun.agent import processes

MARKER = b"\nringrun-agent/1\n"
TO_LAUNCHER = struct.Struct("!BiI")  # kind, rank, length
FRAME_END = b"\n"  # srun passes output on line by line
TO_AGENT = struct.Struct("!BQ")  # kind, length
STDOUT, STDERR, RESULT, EVENT, RECORD, FILE, NUMBERS = 1, 2, 3, 4, 5, 6, 7
JSON, PAYLOAD, PACKAGE, CODE = 1, 2, 3, 4
CHECK = -1  # in place of a rank: the trial import before the ranks start
PAUSE_BYTES, RESUME_BYTES = 1 << 20, 1 << 18  # unsent bytes: above, ranks' output is not read; below, again
RECORD_LIMIT_BYTES = 4 << 20  # longer input is discarded
STACKS_LIMIT_BYTES = 64 << 10
ANSWER_S = 0.7  # time limit of an answer to a request, and to the signal after it
STARVED = 0.5  # a process is starved if its threads waited for a processor for this share of the time
SAME_DUMP_S = 0.5  # text within this time of the last piece belongs to the same stacks
TAKE_PIECES = 1024  # pieces of 64 KiB taken from a rank that has ended


def read_frame() -> bytes:
    """Return the content of the next frame on stdin."""
    return _read_exactly(TO_AGENT.unpack(_read_exactly(TO_AGENT.size))[1])


def _read_exactly(count: int) -> bytes:
    """Read this many bytes from stdin, blocking. At its end (the launcher is lost) the process exits."""
    data = b""
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return data


class Output:
    """The unsent frames, and the pipes from which they are read; `gone` is called if the launcher is lost."""

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


# -- flight recorders --------------------------------------------------------------------------


class Recorder:
    """One rank's socket and pipe, named in its environment; the caller closes `ends` after the fork."""

    def __init__(
        self, rank: int, env: Dict[str, str], selector: selectors.BaseSelector, output: Output
    ) -> None:
        self._rank, self._selector, self._output = rank, selector, output
        ours, theirs = socket.socketpair()
        self._socket, (self._pipe, stacks) = ours.detach(), os.pipe()
        self.ends = (theirs.detach(), stacks)
        env["RINGCOMM_FLIGHT_FD"] = ",".join(f"{each}:{os.fstat(each).st_ino}" for each in self.ends)
        self._open = {self._socket, self._pipe}
        for descriptor in (self._socket, self._pipe, stacks):
            os.set_blocking(descriptor, False)
        selector.register(self._socket, selectors.EVENT_READ, self._read)
        selector.register(self._pipe, selectors.EVENT_READ, self._read_stacks)
        self.pid = 0
        self._received = bytearray()
        self.stacks = bytearray()  # faulthandler's output that is not yet forwarded
        self._stacks_at_s = -SAME_DUMP_S  # time of its last output
        self.answers = False  # whether it uses ringcomm and has opened the socket
        self.has_handler = False  # whether SIGUSR1 makes it write its stacks
        self._asked = 0  # 1: request sent, 2: signal sent
        self._asked_at_s = self._queued_s = 0.0  # when the request was sent, and :func:`queued_s` of then
        self.due: Optional[float] = None  # deadline of the answer
        self._owes_stacks = False  # whether the signal was sent, and nothing was written since

    def end(self) -> bool:
        """Read what is left of a rank that has ended, and return whether the rank used ringcomm."""
        for _ in range(TAKE_PIECES):
            if not self._read():
                break
        for descriptor in list(self._open):
            self._close(descriptor)
        return self.answers

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def ask(self) -> None:
        """Request a record, which comes once."""
        now = time.monotonic()
        self._asked, self.due, self._asked_at_s = 1, now + ANSWER_S, now
        self._queued_s = queued_s(self.pid)
        self.stacks.clear()
        self._request(b"?")

    def ask_numbers(self) -> None:
        """Request the counters of a rank that answers."""
        if self.answers:
            self._request(b"#")

    def _request(self, what: bytes) -> None:
        if self._socket in self._open:
            with contextlib.suppress(OSError):  # closed, or full because the rank does not read
                os.write(self._socket, what)

    def act(self, now: float) -> None:
        """Handle an overdue answer: send SIGUSR1, or a record of the system's facts."""
        if self.due is None or now < self.due:
            return
        if self._asked == 1 and self.has_handler and catches_signal(self.pid):
            self._asked, self.due, self._owes_stacks = 2, now + ANSWER_S, True
            processes.kill([self.pid], signal.SIGUSR1)
            return
        starved = queued_s(self.pid) - self._queued_s > STARVED * (now - self._asked_at_s)
        state = status_of(self.pid).get("State", "")[:1]  # as ps shows it
        if not self.answers and state in ("R", "S"):
            state = "absent"
        elif starved:
            state = "starved"
        content = {
            "type": "record", "format": 1, "reason": "silent", "pid": self.pid, "at": time.time(),
            "state": state,
            "stacks": bytes(self.stacks).decode("utf-8", "replace"),
        }  # fmt: skip
        self._send(json.dumps(content).encode())

    def _send(self, record: bytes) -> None:
        self._asked, self.due = 0, None
        self.stacks.clear()
        self._output.send(RECORD, self._rank, record)

    def _piece(self, descriptor: int) -> bytes:
        """Read one piece; b"" if there is none now, or at the end."""
        try:
            data = os.read(descriptor, 1 << 16) if descriptor in self._open else b""
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data and descriptor in self._open:
            self._close(descriptor)
        return data

    def _read(self) -> bool:
        """Handle one piece from the socket; return whether there may be more."""
        data = self._piece(self._socket)
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        self._received[:] = rest if len(rest) <= RECORD_LIMIT_BYTES else b""
        for line in lines:
            if line.startswith(b'{"type":"hello"'):
                self.answers = True
                self.has_handler = b'"signal":true' in line
            elif line.startswith(b'{"type":"numbers"'):
                self._output.send(NUMBERS, self._rank, line)
            else:
                self._send(line)
        return bool(data)

    def _read_stacks(self) -> None:
        """Read faulthandler's output. Without a request, the user has sent the signal."""
        text = self._piece(self._pipe)
        if not text:
            return
        now = time.monotonic()
        is_new = now - self._stacks_at_s > SAME_DUMP_S
        # What was requested may come after the record that was sent in its place.
        is_manual = is_new and not self._asked and not self._owes_stacks
        self._owes_stacks = self._owes_stacks and not is_new
        self._stacks_at_s = now
        self.stacks += text[: STACKS_LIMIT_BYTES - len(self.stacks)]
        if is_manual:
            self._output.event("asked")


def queued_s(pid: int) -> float:
    """Return the seconds that the threads of a process have waited for a processor; see proc(5)."""
    found = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  as in the rest of the agent
            try:
                with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                    found += int(file.read().split()[1])
            except (OSError, ValueError, IndexError):  # it has just ended, or the kernel has no such file
                continue
    return found / 1e9


def catches_signal(pid: int) -> bool:
    """Return whether the process has a handler for SIGUSR1, so that the signal does not end it."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)


def status_of(pid: int) -> Dict[str, str]:
    """Return the lines of ``/proc/PID/status`` by their names; empty if there is no such file."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in pairs}
