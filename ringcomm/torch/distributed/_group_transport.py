"""Connect the ranks of a process group, and start its failure detector and its timeline.

:class:`~._group.ProcessGroupRingcomm` makes a :class:`GroupTransport`. At the end it calls
:meth:`~ringcomm.group.group.Group.leave` of the group, then :meth:`GroupTransport.close`.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set

from torch.optim import optimizer as torch_optimizer

from ... import api
from ...clock import StepClock
from ...config import Settings
from ...engine.observer import EventSource, Observer, OwnTrace
from ...engine.peer_channels import HeartbeatThread, SilenceLimits
from ...errors import RingcommError
from ...group.failures import GroupWatch
from ...group.group import Group, Peer
from ...job.flight_recorder import RecorderSocket
from ...transport.base import Channels
from ...transport.memory import memory_channels
from ._collectives import tensors_in
from ._rendezvous import GroupRendezvous, meet

_transports: weakref.WeakSet[GroupTransport] = weakref.WeakSet()
_lock = threading.Lock()  # of what all groups of this process share
_default: Optional[weakref.ref[GroupTransport]] = None  # of the newest default group


class GroupTransport:
    """Connect the ranks of a group, and monitor the links; the ``default`` group writes the timeline. Without
    an engine, *direct* carries collectives, *background* point-to-point messages, *control* heartbeats.
    ``watch`` aborts waits on the links when the group's rendezvous reports a failure, or after ``end``.
    """

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], name: str, settings: Settings, default: bool
    ) -> None:
        global _default
        numbers = ", ".join(map(str, ranks))
        self._name = "the default process group" if default else f"process group {name} (ranks {numbers})"
        self._rendezvous: Optional[GroupRendezvous] = None
        joined, channels = None, memory_channels(1)[0]
        peers: Sequence[Peer] = [Peer(0, "localhost", 0, 0, os.getpid())]
        if len(ranks) > 1:
            RecorderSocket.of_this_process()  # so that ringrun can ask where a rank is that does not connect
            self._rendezvous = meet(store, rank, ranks, name, settings)
            joined = self._rendezvous.joined
            channels, peers = joined.channels, joined.peers
            joined.control.server = self._rendezvous.server
        with self.telling_shortages():
            of_all = None if default or _default is None else _default()
            control = None if joined is None else joined.control
            watch = GroupWatch(control, ranks, None if of_all is None else of_all.watch)
            self.watch: GroupWatch = watch
            group = self.group = Group(channels, peers, settings, joined, watch, ranks)
            # Not a bound method: the detector's thread must not keep an unused group alive.
            self.end = _failure_handler(watch, channels)
            self.source: EventSource = OwnTrace()
            if joined is not None:
                with _lock:
                    _transports.add(self)
                # A late rank is reported by the operation's own time limit, which the program may have set.
                limits = SilenceLimits(settings.dead_after_s, settings.stall_warning_s, 0.0)
                progress = group.runner.progress
                self.source = HeartbeatThread(
                    channels.control, group.hosts, limits, watch, progress, self.end, self._name, _waits_for
                )
            group.record(self.source, f"group {name}", steps=optimizer_steps())
            if default and settings.timeline and not api.is_initialized():
                group.recording.start(settings.timeline)
        if default:
            _default = weakref.ref(self)

    @contextmanager
    def telling_shortages(self) -> Iterator[None]:
        """Context manager: :meth:`tell_shortage` of its exception."""
        try:
            yield
        except Exception as problem:
            self.tell_shortage(problem)
            raise

    def tell_shortage(self, problem: BaseException) -> None:
        """Report to all ranks, which end the group, if this process lacks something for it: StartupError."""
        met = self._rendezvous
        shortage = None if met is None else met.joined.control.report_shortage(problem)
        if met is not None and shortage is not None:
            met.joined.channels.close()
            met.end(failed=True)
            raise shortage from problem

    def waits_for(self) -> str:
        """Return the call in which this rank waits for the group's other ranks; empty if it does not wait."""
        progress = self.group.runner.progress()
        call = f"in {self._name}: {progress.doing}, call number {progress.number}"
        return call if progress.doing else ""

    def close(self, wait: bool) -> None:
        """Close the links; with ``wait`` the serving rank first waits until all others have left."""
        self.group.close()
        if self._rendezvous is not None:
            self._rendezvous.end(wait, self.group.failed)


def _waits_for() -> str:
    """Return the calls in which this process waits, in all groups, for a group that waits for this rank."""
    with _lock:  # another group's thread may read it while this group is made
        transports = list(_transports)
    return "; ".join(filter(None, (transport.waits_for() for transport in transports)))


def _failure_handler(watch: GroupWatch, channels: Channels) -> Callable[[RingcommError], None]:
    def failed(error: RingcommError) -> None:
        watch.end(error)
        channels.direct.wake()
        channels.background.wake()

    return failed


# ---- the timeline: each kind of collective is a row, from the call to its end ------------------------------

_open: Dict[str, Set[int]] = {}


def observer() -> Optional[Observer]:
    """Return the observer of this process's collectives, if there is one: all groups write to one timeline.
    That is the job's, if this process is in a job of ringcomm, otherwise that of the default group.
    """
    if api.is_initialized():
        return api.context().engine.observer
    transport = None if _default is None else _default()
    return None if transport is None else transport.source.observer


class Traced:
    """A context manager that records a collective's execution in the timeline."""

    def __init__(self, observer: Observer, group: str, what: str, result: Any) -> None:
        tensors = tensors_in(result)
        types = "/".join(sorted({str(tensor.dtype).replace("torch.", "") for tensor in tensors}))
        elements = sum(tensor.numel() for tensor in tensors)
        self._observer = observer
        self._activity = what.upper()
        self._row = f"group {group}: {what}" + (f", {elements} x {types}" if tensors else "")
        with _lock:  # Two simultaneous collectives must not share a row.
            taken = _open.setdefault(self._row, set())
            self._place = min(set(range(len(taken) + 1)) - taken)
            taken.add(self._place)
        self._label = f"{self._row} ({self._place + 1})" if self._place else self._row
        observer.call_made(self._label)

    def __enter__(self) -> None:
        self._observer.call_started(self._label, self._activity)

    def __exit__(self, *_: Any) -> None:
        self._observer.call_ended(self._label)
        with _lock:
            _open[self._row].discard(self._place)


@lru_cache(maxsize=None)
def optimizer_steps() -> StepClock:
    """Return the counter of this process's optimizer steps; it counts from the first call on."""
    steps = StepClock()
    torch_optimizer.register_optimizer_step_post_hook(lambda optimizer, *_: steps.add(id(optimizer)))
    return steps
