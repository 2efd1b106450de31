"""The supervisor's event loop, and the agents of all hosts: starts them, reads their frames, ends them.

The supervisor (:mod:`ringrun.job.supervise`) decides what follows from their frames and from their ends.
"""

from __future__ import annotations

import random
import selectors
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Optional, Sequence, Set, Tuple

from ringcomm.clock import Clock
from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.transport.reactor import WakeUp

from ..agent import processes
from ..plan.job import HostJob, Job
from ..reach.base import AT_ONCE, NOTHING, RETRIES, last_lines, retry_delay_s
from ..reach.protocol import AgentLink

if TYPE_CHECKING:
    from .supervise import Supervisor

LINGER_S = 3.0  # for an agent's ssh to end after ``done``
FORCE_S = 1.2  # for an agent to report ``done`` after the last signal
PING_S = 10.0
EXIT_S = 1.0  # for an agent's process to exit after the end of its stdout
_IN_PIPES_BYTES = 1 << 16
"""Unsent bytes up to this number do not mean that the network is slow."""
Steps = Sequence[Tuple[int, float]]
"""How to end ranks: (signal, seconds from now)."""
END: Steps = ((15, 0.0), (9, 1.5))
INTERRUPT: Steps = ((2, 0.0), (15, 2.0), (9, 3.5))
KILL: Steps = ((9, 0.0),)
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def term(grace_s: float) -> Steps:
    """Return the steps after SIGTERM from outside."""
    return ((15, 0.0), (9, grace_s))


class Loop:
    """An event loop. Other threads may call only :meth:`call`, :meth:`ask` and :meth:`wake`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._timers: Dict[str, Tuple[float, Callable[[], None]]] = {}  # by name: when, what
        self._calls: Deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, READ, self._wake_up.clear)

    def call(self, action: Callable[[], None]) -> None:
        """Run a function in the loop's thread. For other threads and signal handlers."""
        self._calls.append(action)
        self.wake()

    def ask(self, question: Callable[[], Any], limit_s: float = 5.0) -> Any:
        """Run a function in the loop's thread and return its result or raise its exception."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(question())
            except BaseException as problem:  # noqa: BLE001  raised in the caller's thread
                future.set_exception(problem)

        self.call(run)
        try:
            return future.result(limit_s)
        except FutureTimeoutError:
            raise ConfigError(f"The job has not answered within {limit_s:g} s.") from None

    def wake(self) -> None:
        """Make :meth:`run_once` return now; no effect once the loop has ended."""
        self._wake_up.wake()

    def after(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Set a timer by name, which replaces a timer with the same name."""
        self._timers[name] = self.clock() + seconds, action

    def is_set(self, name: str) -> bool:
        return name in self._timers

    def cancel(self, *names: str) -> None:
        """Cancel timers by their names or first words: ``retry`` cancels ``retry 0``, ``retry 1``, …."""
        for name in list(self._timers):
            if name in names or name.split()[0] in names:
                del self._timers[name]

    def watch(self, descriptor: int, events: int, action: Callable[[], None]) -> None:
        """Call `action` whenever a descriptor (-1: none) is ready for `events`; 0 ends it, before a close."""
        if descriptor >= 0:
            registered = descriptor in self._selector.get_map()
            if events and not registered:
                self._selector.register(descriptor, events, action)
            elif registered and not events:
                self._selector.unregister(descriptor)

    def forget(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.watch(descriptor, 0, lambda: None)

    def run_once(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for a descriptor, a call or a timer, and run the due actions."""
        now = self.clock()
        waits = [limit_s, *(due_s - now for due_s, _ in self._timers.values())]
        for key, _ in self._selector.select(0.0 if self._calls else max(0.0, min(waits))):
            key.data()
        while self._calls:
            self._calls.popleft()()
        now = self.clock()
        for name, timer in list(self._timers.items()):
            if timer[0] <= now and self._timers.get(name) is timer:
                del self._timers[name]
                timer[1]()

    def close(self) -> None:
        self._selector.close()
        self._wake_up.close()


# -- agents -----------------------------------------------------------------------------------


class Agents:
    """Starts one agent per host, and reads their frames."""

    def __init__(self, job: Job, loop: Loop, handler: Supervisor) -> None:
        self.job = job
        self.links = [AgentLink(host.argv, host.reach.start) for host in job.hosts]
        self.closed: Set[int] = set()  # hosts whose links have ended and are not started again
        self._loop = loop
        self._handler = handler
        self._unstarted: Deque[HostJob] = deque(job.hosts)
        self._stopped: Set[int] = set()  # links that are not started again
        self._exiting: Dict[int, float] = {}  # links whose stdout has ended: the time of that

    @property
    def all_closed(self) -> bool:
        """Whether all links have ended."""
        return len(self.closed) == len(self.links)

    @property
    def fading(self) -> bool:
        """Whether a link's stdout has ended, so that :meth:`look` must be called soon."""
        return bool(self._exiting)

    def go_on(self, reading: bool) -> None:
        """Start agents up to the limit of logins, and update the watched descriptors."""
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
            text = host.reach.explain_unstarted(host.name, host.argv, host.python, why)
            self._handler.policy.problem(host, text)

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
            self._handler.policy.confused(host, f"{host.name}: its agent sent invalid data: {problem}.")
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
        # Its ssh may not end.
        cut = lambda: None if host.index in self.closed else self._take_down(host)  # noqa: E731
        self._loop.after(f"linger {host.index}", LINGER_S, cut)

    def _take_down(self, host: HostJob) -> None:
        self._forget(host.index, "stdin", "stdout", "stderr")
        self.links[host.index].kill()
        self.links[host.index].alive = False
        self._exiting[host.index] = self._loop.clock()

    def stop(self, steps: Steps, fetch: bool = False) -> None:
        """Make every agent end its ranks by these steps and exit."""
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

    def add(self, host: HostJob) -> None:
        """Start an agent on a host that joins the job; its index is the next one."""
        self.links.append(AgentLink(host.argv, host.reach.start))
        self._unstarted.append(host)

    def abandon(self, host: HostJob) -> None:
        """Close the link of a host that does not answer; the supervisor's ``hung_up`` is called."""
        if self.links[host.index].alive and host.index not in self._exiting:
            self._take_down(host)

    def send(self, host: HostJob, command: Dict[str, Any]) -> None:
        self.links[host.index].send(command)

    def not_ready(self, host: HostJob) -> str:
        """Return the problem of a host that is not ready in time."""
        link, limit_s = self.links[host.index], self.job.settings.start_timeout_s
        if not link.answered:
            doing = f"{link.argv[0]} had not answered: a login that waits, or a host that is slow to start "
            doing += "Python"
        elif link.outgoing_bytes > _IN_PIPES_BYTES:
            doing = f"{link.outgoing_bytes / 1e6:.1f} MB were still to be sent to it: the network is slow"
        else:
            doing = "its agent was still preparing the job: a slow disk or download, or a busy host"
        said = last_lines(link.stderr_text + "\n" + link.noise)
        printed = "" if said == NOTHING else f" It printed: {said}."
        return f"{host.name}: not ready within {limit_s:g} s (--start-timeout): {doing}.{printed}"


def failed_start(
    host: HostJob, link: AgentLink, status: Optional[int], note: Callable[[str], None], printed: str = "",
    endless: bool = True,
) -> Optional[str]:  # fmt: skip
    """Return the problem of a host whose agent ended before it answered; None to try again with
    ``link.argv``, which may have changed: if `endless`, without limit where the host may still appear.
    """
    said = link.stderr_text or link.noise or printed
    second = link.argv == list(host.fallback)
    tried = f"{host.python} or python3" if second else host.python
    failure = host.reach.explain_start(host.name, link.argv, tried, status, said)
    if failure.no_python and host.fallback and not second:
        other = "its environment is looked for there, then python3" if host.finder else "using python3 there"
        note(f"{host.name} has no {host.python}: {other}")
        link.argv, link.first = list(host.fallback), host.finder
        return None
    if failure.retry and (endless and failure.may_appear or link.attempt <= RETRIES):
        return None
    return failure.text
