"""The agents of all hosts: started, heard, and their links taken down. What follows is decided elsewhere."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Deque, Dict, Optional, Protocol, Sequence, Set, Tuple

from ringcomm.errors import ProtocolError

from ..agent import processes
from ..plan.job import HostJob, Job
from ..reach import ssh
from ..reach.agent_process import Link
from ..reach.protocol import Frame
from .event_loop import READ, WRITE, Loop

LINGER_S = 3.0
"""After all is over on a host, its ssh has this long to end."""
FORCE_S = 1.2
"""After the last signal an agent has this long to report that all is over."""
PING_S = 10.0
FADE_S = 1.0
"""After its stdout an agent has this long to end."""
Steps = Sequence[Tuple[int, float]]


class AgentHandler(Protocol):
    """Who is told what becomes of the agents."""

    def heard(self, host: HostJob, frame: Frame) -> None:
        """An agent says something."""

    def chattered(self, host: HostJob, data: bytes) -> None:
        """An agent, or its ssh, has written to stderr."""

    def confused(self, host: HostJob, why: str) -> None:
        """What came from a host makes no sense; its link is being taken down."""

    def unstartable(self, host: HostJob, text: str) -> None:
        """An agent could not be started on this machine. There is no link."""

    def hung_up(self, host: HostJob, link: Link, status: Optional[int]) -> bool:
        """An agent's link has ended; whether it should be tried again."""


class Agents:
    """Starts one agent per host, and reads what they say.

    Args:
        loop: the supervisor's.
        listener: is told.

    Attributes:
        links: by host.
        closed: hosts whose links are gone for good.
    """

    def __init__(self, job: Job, loop: Loop, handler: AgentHandler) -> None:
        self.job = job
        self.links = [Link(host.argv) for host in job.hosts]
        self.closed: Set[int] = set()
        self._loop = loop
        self._handler = handler
        self._unstarted: Deque[HostJob] = deque(job.hosts)
        self._fading: Dict[int, float] = {}  # links whose stdout ended, and when

    @property
    def all_closed(self) -> bool:
        """Whether there is no link any more."""
        return len(self.closed) == len(self.links)

    @property
    def fading(self) -> bool:
        """Whether :meth:`look` has to be called soon."""
        return bool(self._fading)

    def go_on(self, reading: bool) -> None:
        """Start what may be started, and have the loop wait for just what each link can use now.

        Args:
            reading: whether there is room for what they say.
        """
        # Not more logins at once than a jump host would take.
        logins = sum(link.alive and not link.answered for link in self.links)
        while self._unstarted and logins < ssh.LOGINS_AT_ONCE:
            self._start(self._unstarted.popleft())
            logins += 1
        for host, link in zip(self.job.hosts, self.links):
            self._watch(host, link, reading)

    def _watch(self, host: HostJob, link: Link, reading: bool) -> None:
        readable = link.alive and reading
        self._loop.watch(link.descriptor("stdout"), READ if readable else 0, lambda: self._read(host))
        self._loop.watch(link.descriptor("stderr"), READ, lambda: self._read_stderr(host))
        self._loop.watch(link.descriptor("stdin"), WRITE if link.has_outgoing else 0, link.write)

    def look(self) -> None:
        """See which of those that said their last have ended."""
        now = self._loop.clock()
        for index, since in list(self._fading.items()):
            if self.links[index].poll() is not None or now - since > FADE_S:
                del self._fading[index]
                self._link_ended(self.job.hosts[index])

    def _forget(self, index: int, *names: str) -> None:
        """Stop watching descriptors that are about to be closed."""
        self._loop.forget(*(self.links[index].descriptor(name) for name in names))

    # -- starting ------------------------------------------------------------------------------

    def _start(self, host: HostJob) -> None:
        try:
            self.links[host.index].start(self.job.agent_config(host), self.job.signed_payload())
        except OSError as problem:
            self.closed.add(host.index)
            if host.is_local:
                text = (
                    f"{host.name}: there is no Python at {host.python} that can be started "
                    f"({problem.strerror}). {ssh.other_python(host.name)}"
                )
            else:
                text = (
                    f"{host.name}: {host.argv[0]!r} cannot be started on this machine ({problem.strerror}). "
                    "Install an ssh client, or name one with --ssh."
                )
            self._handler.unstartable(host, text)

    def ping(self) -> None:
        """Remote agents take a launcher that says nothing for dead: say something, from now on."""
        for host, link in zip(self.job.hosts, self.links):
            if not host.is_local and link.alive:
                link.send({"do": "ping"})
        self._loop.after("ping", PING_S, self.ping)

    # -- what agents say -----------------------------------------------------------------------

    def _read(self, host: HostJob) -> None:
        link = self.links[host.index]
        if not link.alive:
            return
        try:
            for frame in link.read():
                self._handler.heard(host, frame)
        except ProtocolError as problem:
            self._take_down(host)
            self._handler.confused(host, f"{host.name}: its answer makes no sense: {problem}.")
            return
        if link.at_end:
            self._forget(host.index, "stdout")
            self._fading[host.index] = self._loop.clock()

    def _read_stderr(self, host: HostJob) -> None:
        link = self.links[host.index]
        descriptor = link.descriptor("stderr")
        data = link.read_stderr()
        if link.descriptor("stderr") < 0:
            self._loop.forget(descriptor)
        if data:
            self._handler.chattered(host, data)

    # -- links that end ------------------------------------------------------------------------

    def _link_ended(self, host: HostJob) -> None:
        link = self.links[host.index]
        self._forget(host.index, "stdin", "stdout", "stderr")  # before anything closes a descriptor
        link.drain_stderr()
        status = link.poll()
        link.close()
        if self._handler.hung_up(host, link, status):
            delay_s = ssh.retry_delay_s(link.attempt, random.random())
            self._loop.after(f"retry {host.index}", delay_s, lambda: self._start(host))
        else:
            self.closed.add(host.index)

    def dismiss(self, host: HostJob) -> None:
        """All is over on that host: its agent may go."""
        self._forget(host.index, "stdin")
        self.links[host.index].close_stdin()
        self._loop.after(f"linger {host.index}", LINGER_S, lambda: self._cut(host))

    def _cut(self, host: HostJob) -> None:
        """All is over on that host, but ssh stays: do without its farewell."""
        if host.index not in self.closed:
            self._take_down(host)

    def _take_down(self, host: HostJob) -> None:
        self._forget(host.index, "stdin", "stdout", "stderr")
        self.links[host.index].kill()
        self.links[host.index].alive = False
        self._fading[host.index] = self._loop.clock()

    def stop(self, steps: Steps) -> None:
        """Have every agent end its ranks by these steps, (signal, seconds from now), and leave."""
        self._unstarted.clear()
        self._loop.cancel("retry")
        for index, link in enumerate(self.links):
            if index in self.closed or index in self._fading:
                continue
            if link.answered and link.alive:
                link.send({"do": "stop", "steps": list(steps)})
            elif link.alive:  # still logging in: nothing of the job is there yet
                self._forget(index, "stdin")
                link.kill()
            else:  # between two attempts
                self.closed.add(index)
        self._loop.after("force", max(after_s for _, after_s in steps) + FORCE_S, self.force)

    def force(self) -> None:
        """Do not wait any longer: cut the links. Agents that are alive end everything on their own."""
        for index, link in enumerate(self.links):
            if index not in self.closed:
                self._fading.pop(index, None)
                self._forget(index, "stdin", "stdout", "stderr")
                link.kill()
                link.close()
                self.closed.add(index)
                if self.job.hosts[index].is_local:
                    processes.sweep(self.job.id, index)

    def send(self, host: HostJob, command: Dict[str, Any]) -> None:
        """Tell one agent something."""
        self.links[host.index].send(command)
