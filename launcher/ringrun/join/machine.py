"""A machine that has joined, at the launcher: its connection, and the agents that are started on it.

A thread per machine carries the streams of its agent (:class:`.connection.Carrier`) until the launcher ends.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from typing import IO, Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from ringcomm.clock import monotonic
from ringcomm.errors import ProtocolError

from ..plan.hosts import HostSpec
from ..plan.reaching import Failure, last_lines
from ..reach.base import Reach
from ..reach.incoming import decoded, fields, said, text, whole
from .connection import EXIT, START, STDERR, STDIN, STDOUT, TELL, Carrier, Frame

LOST = 255
"""The status of an agent whose machine is lost, like ssh's."""
_EXIT = fields({"status": whole(-64, 255), "why": text(1024)})
_LEAVING = fields({"leaving": said(200)})


class RemoteAgent:
    """An agent on a machine that has joined, with the pipes and methods of :class:`subprocess.Popen`."""

    def __init__(self, machine: Machine) -> None:
        self.returncode: Optional[int] = None
        self._over = threading.Event()
        self.stdin: IO[bytes]
        self.stdout: IO[bytes]
        self.stderr: IO[bytes]
        (read_in, self.stdin), (self.stdout, write_out), (self.stderr, write_err) = _pipe(), _pipe(), _pipe()
        self._machine = machine
        self.sources, self.sinks = {STDIN: read_in}, {STDOUT: write_out, STDERR: write_err}
        machine.call(lambda: machine.begin(self))

    def poll(self) -> Optional[int]:
        """Its exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        """Wait for its end."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("ringrun join", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """Give it up. It ends by itself, as its stdin does."""
        self.end(-9)
        self._machine.call(lambda: self._machine.give_up(self))

    def end(self, status: int) -> None:
        """It has ended."""
        if self.returncode is None:
            self.returncode = status
        self._over.set()


def _pipe() -> Tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return open(reader, "rb", 0), open(writer, "wb", 0)


class Machine:
    """A machine that has joined."""

    def __init__(self, name: str, facts: Dict[str, Any], carrier: Carrier) -> None:
        self.name, self.facts = name, facts
        self.lost = ""
        self._carrier = carrier
        self._calls: Deque[Callable[[], None]] = deque()
        self._agent: Optional[RemoteAgent] = None
        self._closing = False
        self.over = threading.Event()

    def spec(self, with_folder: bool) -> HostSpec:
        """The machine as a host of a job."""
        folder = self.facts["cwd"] if with_folder else None
        return HostSpec(self.name, slots=self.facts["slots"], python=self.facts["python"], cwd=folder)

    # -- any thread --------------------------------------------------------------------------------

    def call(self, action: Callable[[], None]) -> None:
        """Do this in the machine's thread."""
        self._calls.append(action)
        self._carrier.wake()
        if self.over.is_set():  # no thread takes it any more
            self._do_calls()

    def _do_calls(self) -> None:
        while True:
            try:
                action = self._calls.popleft()
            except IndexError:
                return
            action()

    def close(self, limit_s: float = 2.0) -> None:
        """End the connection: the job is over."""
        self.call(self._close)
        self.over.wait(limit_s)

    # -- the machine's thread ----------------------------------------------------------------------

    def _close(self) -> None:
        self._carrier.tell({"over": True})
        self._closing = True

    def begin(self, agent: RemoteAgent) -> None:
        """Have the machine start an agent."""
        if self._agent is not None:
            self._agent.end(LOST)
        self._agent = agent
        self._carrier.attach(self._carrier.number + 1, agent.sources, agent.sinks)
        self._carrier.send(START)
        if self.over.is_set():
            agent.end(LOST)
            self._carrier.detach()

    def give_up(self, agent: RemoteAgent) -> None:
        """Carry nothing for an agent any more."""
        if self._agent is agent:
            self._agent = None
            self._carrier.send(STDIN)
            self._carrier.detach()

    def run(self) -> None:
        """Carry the streams of agents until the connection ends."""
        try:
            while not self._carrier.ended and not (self._closing and not self._carrier.has_outgoing):
                for frame in self._carrier.turn(60.0):
                    self._take(frame)
                self._do_calls()
            self.lost = self.lost or "its connection was closed"
        except (ProtocolError, OSError) as problem:
            self.lost = f"its connection broke: {getattr(problem, 'strerror', None) or problem}"
        self._tear_down()

    def _take(self, frame: Frame) -> None:
        if frame.kind == EXIT and frame.number == self._carrier.number:
            facts = decoded(frame.data, _EXIT)
            self._carrier.finish(STDOUT)
            self._carrier.finish(STDERR, facts["why"].encode())
            if self._agent is not None:
                self._agent.end(facts["status"])
        elif frame.kind == TELL:
            self.lost = str(decoded(frame.data, _LEAVING)["leaving"])

    def _tear_down(self) -> None:
        """Let the launcher read what has come, and why nothing more does."""
        until_s = monotonic() + 5.0
        try:
            self._carrier.finish(STDERR, f"\n{self.lost}\n".encode())
            self._carrier.finish(STDOUT)
            self._carrier.ended = True
            while any(kind in self._carrier.streams for kind in (STDOUT, STDERR)) and monotonic() < until_s:
                self._carrier.turn(0.1)
        except (ProtocolError, OSError):
            pass  # the connection is lost already
        finally:
            if self._agent is not None:
                self._agent.end(LOST)
            self._carrier.close()
            self.over.set()
            self._do_calls()


class Joined(Reach):
    """Starts agents on machines that have joined."""

    description = "joins with a code"
    connection = "the machine"
    gets_shell = False

    def __init__(self, machines: Dict[str, Machine], port: int = 0) -> None:
        self._machines, self.dials_port = machines, port > 0

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        """Words for messages; the machine starts its own interpreter."""
        return ["ringrun", "join", spec.name]

    def start(self, argv: Sequence[str]) -> Any:
        """Start an agent there."""
        machine = self._machines[argv[-1]]
        if machine.over.is_set():
            raise OSError(0, machine.lost)
        return RemoteAgent(machine)

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        """The machine has gone."""
        return f"{host}: the machine has left: {why}."

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        """The machine has gone."""
        return Failure(self.explain_loss(host, status, output)) if status == LOST else None

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        """Why the machine is lost: what its thread, or the machine itself, has said."""
        why = last_lines(output) if output.strip() else "its agent has ended there"
        return f"{host}: the machine that has joined is lost: {why}."
