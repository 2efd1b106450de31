"""The agent's ends of the flight recorder sockets, on which ranks report their state.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. A rank that uses ringcomm
answers a request from a separate thread. If it does not answer, the agent sends SIGUSR1, but only if the rank
has reported that its handler writes its stacks and does nothing else. Stacks have a separate pipe: the
handler acquires no lock, so on the socket its text could be inserted into an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from typing import Dict, List, Optional, Tuple

from ringrun.agent import framing, processes

RECORD_LIMIT_BYTES = 4 << 20  # longer input is discarded
STACKS_LIMIT_BYTES = 64 << 10
ANSWER_S = 0.7  # time limit of an answer to a request, and to the signal after it
STARVED = 0.5  # a process is starved if its threads waited for a processor for this share of the time
SAME_DUMP_S = 0.5  # text within this time of the last piece belongs to the same stacks
TAKE_PIECES = 1024  # pieces of 64 KiB taken from a rank that has ended


class Recorder:
    """One rank's socket and pipe, and the data received from them."""

    def __init__(self, rank: int, sock: socket.socket, pipe: int) -> None:
        self.rank = rank
        self.sock = sock
        self.pipe = pipe  # -1: closed
        self.pid = 0
        self.received = bytearray()
        self.stacks = bytearray()  # faulthandler's output that is not yet forwarded
        self.stacks_at_s = -SAME_DUMP_S  # time of its last output
        self.answers = False  # whether it uses ringcomm and has opened the socket
        self.has_handler = False  # whether SIGUSR1 makes it write its stacks
        self.asked = 0  # 1: request sent, 2: signal sent
        self.asked_at_s = self.queued_s = 0.0  # when the request was sent, and :func:`queued_s` of then
        self.due: Optional[float] = None  # deadline of the answer
        self.owes_stacks = False  # whether the signal was sent, and nothing was written since


class Recorders:
    """The recorders of all ranks of this host. The selector's entries have callables without arguments as
    data; records, counters and the event ``asked`` go to `output`.
    """

    def __init__(self, selector: selectors.BaseSelector, output: framing.Output) -> None:
        self._selector, self._output = selector, output
        self._recorders: Dict[int, Recorder] = {}

    def open(self, rank: int, env: Dict[str, str]) -> Tuple[int, int]:
        """Create a socket and a pipe for a new rank, and name them in its environment `env`. The caller
        closes the returned descriptors, the rank's ends, after the fork.
        """
        ours, theirs = socket.socketpair()
        pipe, stacks = os.pipe()
        ours.setblocking(False)
        os.set_blocking(pipe, False)
        os.set_blocking(stacks, False)
        descriptors = (theirs.detach(), stacks)
        env["RINGCOMM_FLIGHT_FD"] = ",".join(f"{each}:{os.fstat(each).st_ino}" for each in descriptors)
        recorder = self._recorders[rank] = Recorder(rank, ours, pipe)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read(recorder))
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read_stacks(recorder))
        return descriptors

    def started(self, rank: int, pid: int) -> None:
        """Store the process id of a rank that has started."""
        self._recorders[rank].pid = pid

    def ended(self, rank: int) -> bool:
        """Read the remaining data of a rank that has ended, and close its descriptors. Return whether the
        rank used ringcomm.
        """
        recorder = self._recorders.pop(rank)
        for _ in range(TAKE_PIECES):
            if not self._read(recorder):
                break
        self._close_socket(recorder)
        self._close_pipe(recorder)
        return recorder.answers

    def _close_socket(self, recorder: Recorder) -> None:
        if recorder.sock.fileno() >= 0:
            self._selector.unregister(recorder.sock)
            recorder.sock.close()

    def _close_pipe(self, recorder: Recorder) -> None:
        if recorder.pipe >= 0:
            self._selector.unregister(recorder.pipe)
            os.close(recorder.pipe)
            recorder.pipe = -1

    def ask(self) -> None:
        """Request a record from every rank; each answers once."""
        for recorder in self._recorders.values():
            now = time.monotonic()
            recorder.asked, recorder.due, recorder.asked_at_s = 1, now + ANSWER_S, now
            recorder.queued_s = queued_s(recorder.pid)
            recorder.stacks.clear()
            self._request(recorder, b"?")

    def ask_numbers(self) -> None:
        """Request every rank's counters. A rank that does not answer is left out."""
        for recorder in self._recorders.values():
            if recorder.answers:
                self._request(recorder, b"#")

    def _request(self, recorder: Recorder, what: bytes) -> None:
        with contextlib.suppress(OSError):  # closed, or full because the rank does not read
            recorder.sock.send(what)

    def due(self) -> List[float]:
        """Return the deadlines at which :meth:`act` must be called."""
        return [recorder.due for recorder in self._recorders.values() if recorder.due is not None]

    def act(self, now: float) -> None:
        """Handle overdue answers: send SIGUSR1, or a record of the system's facts."""
        for recorder in list(self._recorders.values()):
            if recorder.due is None or now < recorder.due:
                continue
            if recorder.asked == 1 and recorder.has_handler and catches_signal(recorder.pid):
                recorder.asked, recorder.due = 2, now + ANSWER_S
                recorder.owes_stacks = True
                processes.kill([recorder.pid], signal.SIGUSR1)
            else:
                self._send_substitute(recorder, now)

    def _send_substitute(self, recorder: Recorder, now: float) -> None:
        """Send a record in place of a rank that does not answer."""
        waited_s = queued_s(recorder.pid) - recorder.queued_s
        starved = waited_s > STARVED * (now - recorder.asked_at_s)
        content = {
            "type": "record", "format": 1, "reason": "silent", "pid": recorder.pid, "at": time.time(),
            "state": "starved" if starved else status_of(recorder.pid).get("State", "")[:1],  # as ps shows it
            "stacks": bytes(recorder.stacks).decode("utf-8", "replace"),
        }  # fmt: skip
        self._send(recorder, json.dumps(content).encode())

    def _send(self, recorder: Recorder, record: bytes) -> None:
        recorder.asked, recorder.due = 0, None
        recorder.stacks.clear()
        self._output.send(framing.RECORD, recorder.rank, record)

    def _read(self, recorder: Recorder) -> bool:
        """Read one piece from the socket; return whether there may be more."""
        try:
            data = recorder.sock.recv(1 << 16) if recorder.sock.fileno() >= 0 else b""
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_socket(recorder)
            return False
        recorder.received += data
        *lines, rest = bytes(recorder.received).split(b"\n")
        recorder.received[:] = rest if len(rest) <= RECORD_LIMIT_BYTES else b""
        self._take(recorder, lines)
        return True

    def _take(self, recorder: Recorder, lines: List[bytes]) -> None:
        for line in lines:
            if line.startswith(b'{"type":"hello"'):
                recorder.answers = True
                recorder.has_handler = b'"signal":true' in line
            elif line.startswith(b'{"type":"numbers"'):
                self._output.send(framing.NUMBERS, recorder.rank, line)
            else:
                self._send(recorder, line)

    def _read_stacks(self, recorder: Recorder) -> None:
        """Read faulthandler's output. Without a request, the user has sent the signal."""
        try:
            text = os.read(recorder.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not text:
            self._close_pipe(recorder)
            return
        now = time.monotonic()
        is_new = now - recorder.stacks_at_s > SAME_DUMP_S
        # What was requested may come after the record that was sent in its place.
        is_manual = is_new and not recorder.asked and not recorder.owes_stacks
        recorder.owes_stacks = recorder.owes_stacks and not is_new
        recorder.stacks_at_s = now
        recorder.stacks += text[: STACKS_LIMIT_BYTES - len(recorder.stacks)]
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
