"""The agents of all hosts: starts them, reads their frames and closes their links.

The supervisor (:mod:`ringrun.job.supervise`) decides what follows from their frames and from their ends.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Deque, Dict, Optional, Protocol, Sequence, Set, Tuple

from ringcomm.errors import ProtocolError

from ..agent import processes
from ..plan.job import HostJob, Job
from ..reach.agent_process import AgentLink
from ..reach.base import AT_ONCE, retry_delay_s
from ..reach.protocol import Frame
from .event_loop import READ, WRITE, Loop

LINGER_S = 3.0
"""Seconds that an agent's ssh may take to end after ``done``."""
FORCE_S = 1.2
"""Seconds that an agent may take to report ``done`` after the last signal."""
PING_S = 10.0
EXIT_S = 1.0
"""Seconds that an agent's process may take to exit after the end of its stdout."""
Steps = Sequence[Tuple[int, float]]
"""How to end ranks: (signal, seconds from now)."""
END: Steps = ((15, 0.0), (9, 1.5))
INTERRUPT: Steps = ((2, 0.0), (15, 2.0), (9, 3.5))
KILL: Steps = ((9, 0.0),)


def term(grace_s: float) -> Steps:
    """Return the steps after SIGTERM from outside."""
    return ((15, 0.0), (9, grace_s))


class AgentHandler(Protocol):
    """Callbacks for frames, errors and ends of the agents' links."""

    def received(self, host: HostJob, frame: Frame) -> None:
        """Handle a frame of an agent."""

    def chattered(self, host: HostJob, data: bytes) -> None:
        """Handle stderr of an agent or its ssh."""

    def confused(self, host: HostJob, why: str) -> None:
        """Handle invalid data of a host, whose link is being closed."""

    def problem(self, host: HostJob, text: str) -> None:
        """Handle an agent's link whose process could not be started on this machine."""

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        """Handle the end of an agent's link; return whether to start it again."""


class Agents:
    """Starts one agent per host, and reads their frames; `closed` has the indices of hosts whose links have
    ended and are not started again.
    """

    def __init__(self, job: Job, loop: Loop, handler: AgentHandler) -> None:
        self.job = job
        self.links = [self._link(host) for host in job.hosts]
        self.closed: Set[int] = set()
        self._loop = loop
        self._handler = handler
        self._unstarted: Deque[HostJob] = deque(job.hosts)
        self._stopped: Set[int] = set()  # links that are not started again
        self._exiting: Dict[int, float] = {}  # links whose stdout has ended: the time of that

    @staticmethod
    def _link(host: HostJob) -> AgentLink:
        return AgentLink(host.argv, caches=not host.is_local, spawn=host.reach.start)

    @property
    def all_closed(self) -> bool:
        """Whether all links have ended."""
        return len(self.closed) == len(self.links)

    @property
    def fading(self) -> bool:
        """Whether a link's stdout has ended, so that :meth:`look` must be called soon."""
        return bool(self._exiting)

    def go_on(self, reading: bool) -> None:
        """Start agents up to the limit of logins, and update the watched descriptors. Agents are not read
        while the console is full.
        """
        # A jump host limits the number of simultaneous logins.
        logins = sum(link.alive and not link.answered for link in self.links)
        while self._unstarted and logins < AT_ONCE:
            self._start(self._unstarted.popleft())
            logins += 1
        for host, link in zip(self.job.hosts, self.links):
            self._watch(host, link, reading)

    def _watch(self, host: HostJob, link: AgentLink, reading: bool) -> None:
        readable = link.alive and reading
        self._loop.watch(link.descriptor("stdout"), READ if readable else 0, lambda: self._read(host))
        self._loop.watch(link.descriptor("stderr"), READ, lambda: self._read_stderr(host))
        self._loop.watch(link.descriptor("stdin"), WRITE if link.has_outgoing else 0, link.write)

    def look(self) -> None:
        """Handle links whose stdout has ended and whose process has exited, or has exceeded its limit."""
        now = self._loop.clock()
        for index, since in list(self._exiting.items()):
            if self.links[index].poll() is not None or now - since > EXIT_S:
                del self._exiting[index]
                self._link_ended(self.job.hosts[index])

    def _forget(self, index: int, *names: str) -> None:
        """Stop watching descriptors that are about to be closed."""
        self._loop.forget(*(self.links[index].descriptor(name) for name in names))

    # -- starting ------------------------------------------------------------------------------

    def _start(self, host: HostJob) -> None:
        if host.index in self.closed:  # stopped meanwhile
            return
        try:
            self.links[host.index].start(self.job.agent_config(host), self.job.signed_payload())
        except OSError as problem:
            self.closed.add(host.index)
            why = str(problem.strerror)
            self._handler.problem(
                host, host.reach.explain_unstarted(host.name, host.argv, host.python, why)
            )

    def ping(self) -> None:
        """Send a ping to all remote agents periodically: without it they consider the launcher dead."""
        for host, link in zip(self.job.hosts, self.links):
            if not host.is_local and link.alive:
                link.send({"do": "ping"})
        self._loop.after("ping", PING_S, self.ping)

    # -- data from agents ----------------------------------------------------------------------

    def _read(self, host: HostJob) -> None:
        link = self.links[host.index]
        if not link.alive:
            return
        try:
            for frame in link.read():
                self._handler.received(host, frame)
        except ProtocolError as problem:
            self._take_down(host)
            self._handler.confused(host, f"{host.name}: its agent sent invalid data: {problem}.")
            return
        if link.at_end:
            self._forget(host.index, "stdout")
            self._exiting[host.index] = self._loop.clock()

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
        if self._handler.hung_up(host, link, status) and host.index not in self._stopped:
            delay_s = retry_delay_s(link.attempt, random.random())
            self._loop.after(f"retry {host.index}", delay_s, lambda: self._start(host))
        else:
            self.closed.add(host.index)

    def dismiss(self, host: HostJob) -> None:
        """Close the stdin of an agent that has reported ``done``, so that it exits."""
        self._forget(host.index, "stdin")
        self.links[host.index].close_stdin()
        self._loop.after(f"linger {host.index}", LINGER_S, lambda: self._cut(host))

    def _cut(self, host: HostJob) -> None:
        """Close the link of an agent that reported ``done`` if its ssh has not ended in time."""
        if host.index not in self.closed:
            self._take_down(host)

    def _take_down(self, host: HostJob) -> None:
        self._forget(host.index, "stdin", "stdout", "stderr")
        self.links[host.index].kill()
        self.links[host.index].alive = False
        self._exiting[host.index] = self._loop.clock()

    def stop(self, steps: Steps, fetch: bool = False) -> None:
        """Make every agent end its ranks by these steps and exit. With `fetch` the agents send the files of
        ``--fetch`` first, without a time limit.
        """
        self._loop.cancel("retry")
        for host in self.job.hosts:
            self.stop_host(host, steps, fetch)
        if not fetch:
            self._loop.after("force", max(after_s for _, after_s in steps) + FORCE_S, self.force)

    def stop_host(self, host: HostJob, steps: Steps = (), fetch: bool = False) -> None:
        """Make the agent of one host end its ranks and exit; see :meth:`stop`."""
        link = self.links[host.index]
        if link.answered and link.alive:
            link.send({"do": "stop", "steps": list(steps), "fetch": fetch})
        elif link.alive:  # still logging in: no process of the job runs there yet
            self._stopped.add(host.index)
            self._forget(host.index, "stdin")
            link.kill()
        elif host.index not in self._exiting:  # not started yet, or between two attempts
            self.closed.add(host.index)

    def force(self) -> None:
        """Close all links without waiting. Agents that still run then end their ranks without a command."""
        for index, link in enumerate(self.links):
            if index not in self.closed:
                self._exiting.pop(index, None)
                self._forget(index, "stdin", "stdout", "stderr")
                link.kill()
                link.close()
                self.closed.add(index)
                if self.job.hosts[index].is_local:
                    processes.sweep(self.job.id, index)

    def send_archive(self, host: HostJob, kind: int, archive: bytes) -> None:
        """Send an archive that a host's agent has requested."""
        self.links[host.index].send_frame(kind, archive)

    def add(self, host: HostJob) -> None:
        """Start an agent on a host that joins the job; its index is the next one."""
        self.links.append(self._link(host))
        self._unstarted.append(host)

    def abandon(self, host: HostJob) -> None:
        """Close the link of a host that does not answer; :meth:`AgentHandler.hung_up` is called."""
        if self.links[host.index].alive and host.index not in self._exiting:
            self._take_down(host)

    def send(self, host: HostJob, command: Dict[str, Any]) -> None:
        self.links[host.index].send(command)
