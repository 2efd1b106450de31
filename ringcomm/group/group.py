"""A group of ranks, as one of them sees it: links, calls in order, failure detector, records and timeline.

The context of a job is made of one, and so is a process group of ``torch.distributed``. Its life is: connect,
:meth:`Group.record`, calls, :meth:`Group.leave` (or :meth:`Group.stop`), :meth:`Group.close`.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Sequence, Tuple

from ..clock import StepClock
from ..collective.runner import Runner
from ..config import Settings
from ..configuration.settings import polling_s
from ..engine.engine import Engine
from ..engine.observer import EventSource
from ..errors import RingcommError
from ..job.flight_recorder import Activity, FlightRecorder, GroupFacts
from ..job.timeline import Recording
from ..schedule.select import Selector
from ..transport.base import Channels, StoppableWatch
from .failures import Reporter

if TYPE_CHECKING:
    from ..rendezvous.client import Joined
    from .point_to_point import MessageHistory


class Peer(NamedTuple):
    """A rank of the job, as it is described to every other."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    pid: int
    member: int = -1  # its number in an elastic job


class Group:
    """One rank's part in a group."""

    activity: Activity
    flight: FlightRecorder
    recording: Recording

    def __init__(
        self,
        channels: Channels,
        peers: Sequence[Peer],
        settings: Settings,
        joined: Optional[Joined] = None,
        reporter: Any = None,  # by default the connection to the rendezvous
        members: Optional[Sequence[int]] = None,  # ranks of the whole job; by default all
        selector: Optional[Selector] = None,
    ) -> None:
        rank, size = self.rank, self.size = channels.direct.rank, channels.direct.size
        self.channels, self.peers, self.settings = channels, tuple(peers), settings
        self.control = None if joined is None else joined.control  # the connection to the rendezvous
        self.generation = 0 if joined is None else joined.generation
        self.relayed = frozenset() if joined is None else joined.relayed  # pairs of hosts
        self.reporter = reporter = reporter or self.control or Reporter()
        self.members = range(size) if members is None else members
        self.failed = False  # after :meth:`leave`: the group has ended with an error
        own = self.peers[rank]
        self.host, self.local_rank = own.host, own.local_rank
        self.hosts = [peer.host for peer in self.peers]
        self.local_size = sum(1 for peer in self.peers if peer.host_index == own.host_index)
        self.spin_s = polling_s(settings, self.local_size)
        # For a call that one thread is in while another one leaves.
        self._leaving = channels.direct.watch = StoppableWatch(reporter)
        channels.background.watch = reporter
        channels.direct.make_wakeable()
        self.runner = Runner(channels.direct, settings, self.generation, self.spin_s, reporter, selector)
        self._pid = os.getpid()

    def record(
        self, detector: EventSource, name: str = "calls", engine: Optional[Engine] = None,
        steps: Optional[StepClock] = None,
    ) -> None:  # fmt: skip
        """Record the rank's calls from now on; the failure detector also brings the timeline to rank 0."""
        self._detector = detector
        self.recording = Recording(detector, self.hosts)
        self.activity = Activity(self.runner, engine, self.members, steps)
        rank = self.members[self.rank]
        facts = GroupFacts(rank, self.size, self.host, self.generation, self.members, name)
        self.flight = FlightRecorder(facts, self.settings.diagnose_dir, self.runner, self.activity, engine)

    def record_messages(self, type_name: Callable[[int], str]) -> MessageHistory:
        """Record point-to-point messages as well, after :meth:`record`."""
        from .point_to_point import MessageHistory  # only groups of PyTorch have such messages

        history = MessageHistory(type_name)
        history.on_failure = self.flight.failed
        self.activity.messages = self.flight.messages = history
        return history

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the rank's: it shares connections, but owns none."""
        return os.getpid() != self._pid

    def addresses(self, peer: int) -> Optional[Tuple[str, str]]:
        """Return the addresses of this rank and of a peer in their link; None without a network."""
        sock: Any = getattr(self.channels.direct.link(peer), "sock", None)
        if sock is None or sock.family == socket.AF_UNIX:
            return None
        return str(sock.getsockname()[0]), str(sock.getpeername()[0])

    def stop(self, reason: str, ok: bool, failure: Optional[RingcommError] = None) -> None:
        """End the threads of calls and of the failure detector, refuse further calls; see :meth:`leave`."""
        self._stop_calls(reason, ok, failure)
        self._detector.stop()

    def _stop_calls(self, reason: str, ok: bool, failure: Optional[RingcommError]) -> None:
        self.flight.close(reason, ok, failure)
        self.runner.stop(self._leaving)

    def leave(self, reason: str, ok: bool, failure: Optional[RingcommError] = None) -> None:
        """Finish the timeline, :meth:`stop`, and report that this rank leaves, an abort unless ``ok``."""
        self._stop_calls(reason, ok, failure)  # first of all: another thread may be about to call
        if ok:
            self.recording.finish()
            self._point_out_settings()
        self._detector.stop()
        self.failed = not ok or self.reporter.abort_error is not None
        if self.control is not None:
            self.control.leave(reason, ok)

    def _point_out_settings(self) -> None:
        if self.size > 1 and self.members[self.rank] == 0:
            from ..configuration.settings import without_effect  # not needed while a job runs

            for topic, text in without_effect(self.settings):
                self.reporter.warn(topic, text)

    def close(self) -> None:
        """Close the links and the timeline's file, after :meth:`stop` or :meth:`leave`."""
        self.channels.close()
        self.recording.close()
