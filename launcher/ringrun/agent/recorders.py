"""The agent's ends of the sockets on which ranks tell what they are doing.

Standard library only: the launcher sends this file along with :mod:`ringrun.agent.agent`. A rank that uses
ringcomm answers from a thread of its own. One that does not is asked with SIGUSR1, but only if it has
said that this makes it write its stacks and does nothing else. Stacks come through a pipe of their own:
whoever writes them waits for no lock, so they would end up in the middle of an answer.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from ringrun.agent import processes

RECORD_LIMIT_BYTES = 4 << 20  # what is longer is not a record
STACKS_LIMIT_BYTES = 64 << 10
ANSWER_S = 0.7  # to answer by itself, and then again after the signal
SAME_DUMP_S = 0.5  # what is written no later than this after the last piece belongs to the same stacks
TAKE_PIECES = 1024  # pieces of 64 KiB taken from a rank that has ended


class Recorder:
    """One rank's socket and pipe, and what has come out of them."""

    def __init__(self, rank: int, sock: socket.socket, pipe: int) -> None:
        self.rank = rank
        self.sock = sock
        self.pipe = pipe  # -1: closed
        self.pid = 0
        self.received = bytearray()
        self.stacks = bytearray()  # what faulthandler wrote since it was last passed on
        self.written = -SAME_DUMP_S  # when it wrote last
        self.catches = False  # whether SIGUSR1 makes it write its stacks
        self.asked = 0  # 1: asked, 2: asked with a signal
        self.due: Optional[float] = None  # when to give up on what was asked last


class Recorders:
    """All ranks of this host.

    Args:
        selector: the agent's; its entries are called without arguments.
        send: takes a rank and its record as JSON.
        wanted: told that somebody has sent a rank SIGUSR1 by hand.
    """

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[int, bytes], None], wanted: Callable[[], None]
    ) -> None:
        self._selector, self._send, self._wanted = selector, send, wanted
        self._recorders: Dict[int, Recorder] = {}

    def open(self, rank: int, env: Dict[str, str]) -> Tuple[int, int]:
        """A socket and a pipe for a new rank, named in its environment; the caller closes these ends."""
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
        """The rank runs now."""
        if rank in self._recorders:
            self._recorders[rank].pid = pid

    def ended(self, rank: int) -> None:
        """The rank has ended: take what it wrote last."""
        recorder = self._recorders.pop(rank, None)
        if recorder is not None:
            for _ in range(TAKE_PIECES):
                if not self._read(recorder):
                    break
            self._close_socket(recorder)
            self._close_pipe(recorder)

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
        """Ask every rank what it is doing; each answers once."""
        for recorder in self._recorders.values():
            recorder.asked, recorder.due = 1, time.monotonic() + ANSWER_S
            recorder.stacks.clear()
            try:
                recorder.sock.send(b"?")
            except OSError:  # nobody is there, or it has not read for very long: the deadline says so
                pass

    def due(self) -> List[float]:
        """When :meth:`act` has something to do."""
        return [recorder.due for recorder in self._recorders.values() if recorder.due is not None]

    def act(self, now: float) -> None:
        """Do without the answers that are overdue."""
        for recorder in list(self._recorders.values()):
            if recorder.due is None or now < recorder.due:
                continue
            facts = process_facts(recorder.pid)
            if recorder.asked == 1 and recorder.catches and catches_signal(recorder.pid):
                recorder.asked, recorder.due = 2, now + ANSWER_S
                processes.kill([recorder.pid], signal.SIGUSR1)
            else:
                self._pass_on(recorder, dict(facts, reason="silent"))

    def _pass_on(self, recorder: Recorder, facts: Dict[str, Any]) -> None:
        """What can be said of a rank that does not answer."""
        stacks = bytes(recorder.stacks).decode("utf-8", "replace")
        content = dict(facts, type="record", format=1, stacks=stacks, pid=recorder.pid, at=time.time())
        recorder.stacks.clear()
        recorder.asked, recorder.due = 0, None
        self._send(recorder.rank, json.dumps(content).encode())

    def _read(self, recorder: Recorder) -> bool:
        """Take a piece; whether there may be more."""
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
                recorder.catches = b'"signal":true' in line
            else:
                recorder.asked, recorder.due = 0, None
                recorder.stacks.clear()
                self._send(recorder.rank, line)

    def _read_stacks(self, recorder: Recorder) -> None:
        """Take what faulthandler wrote: if nobody has asked, somebody sent the signal by hand."""
        try:
            text = os.read(recorder.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not text:
            self._close_pipe(recorder)
            return
        now = time.monotonic()
        by_hand = not recorder.asked and now - recorder.written > SAME_DUMP_S
        recorder.written = now
        recorder.stacks += text[: STACKS_LIMIT_BYTES - len(recorder.stacks)]
        if by_hand:
            self._wanted()


def process_facts(pid: int) -> Dict[str, Any]:
    """What Linux says about a process that says nothing: ``state``, as the letter that ``ps`` shows."""
    return {"state": status_of(pid).get("State", "")[:1]}


def catches_signal(pid: int) -> bool:
    """Whether SIGUSR1 would not end the process."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)


def status_of(pid: int) -> Dict[str, str]:
    """The lines of ``/proc/PID/status`` by their names; empty where there is none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in pairs}
