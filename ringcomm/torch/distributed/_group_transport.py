"""A group's other ranks: the links to them, and what watches over those."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Optional, Sequence, Union

from ... import api
from ...collective.progress import Progress
from ...config import Settings
from ...context import polling_s
from ...engine.heartbeat import Vigil
from ...engine.peer_channels import Limits
from ...engine.single_rank import OwnTrace
from ...errors import RingcommError
from ...group.abort_watch import GroupWatch
from ...timeline import Recording
from ...transport.base import Lanes
from ...transport.tcp import SocketFabric
from ._store import Meeting, meet
from ._trace import write_here

_companies: weakref.WeakSet[Company] = weakref.WeakSet()
_companies_lock = threading.Lock()


class Company:
    """Meets the other ranks of a group.

    Args:
        store: the group's part of PyTorch's store.
        rank: this process's rank in the group.
        ranks: the ranks of the whole job that the group consists of.
        name: the group's name.
        settings: in force for the group.
        default: whether it is the group of all ranks.

    Attributes:
        lanes: the links.
        watch: interrupts waits on them.
        generation: membership epoch.
        host: this rank's.
        spin_s: how long to poll before sleeping.

    Raises:
        StartupError: (or one of its kinds) the group could not be put together.
    """

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], name: str, settings: Settings, default: bool
    ) -> None:
        self.generation, self.spin_s, self.host = 0, 0.0, "localhost"
        self.lanes = Lanes(*(SocketFabric(0, {}) for _ in Lanes._fields))
        numbers = ", ".join(map(str, ranks))
        self._name = "the default process group" if default else f"process group {name} (ranks {numbers})"
        self._failed = False
        self._default = default
        self._settings = settings
        self._meeting: Optional[Meeting] = None
        self._vigil: Optional[Vigil] = None
        self._recording: Optional[Recording] = None
        self._progress: Callable[[], Progress] = Progress
        control = None
        if len(ranks) > 1:
            self._meeting = meet(store, rank, ranks, name, settings)
            joined = self._meeting.joined
            self.generation, control, self.lanes = joined.generation, joined.control, joined.lanes
            own, self.host = joined.peers[rank].host_index, joined.peers[rank].host
            self.spin_s = polling_s(settings, sum(peer.host_index == own for peer in joined.peers))
        self.watch = GroupWatch(control, ranks)
        for fabric in (self.lanes.calls, self.lanes.engine):
            fabric.watch = self.watch
            fabric.make_wakeable()

    def watch_over(self, progress: Callable[[], Progress]) -> None:
        """Give heartbeats from now on, and expect them; write the timeline if one is wanted.

        Args:
            progress: how far this rank is in its collectives.
        """
        if self._meeting is None:
            self._write_timeline(OwnTrace(), [self.host])
            return
        self._progress = progress
        with _companies_lock:
            _companies.add(self)
        settings, hosts = self._settings, [peer.host for peer in self._meeting.joined.peers]
        # Who does not come is given up by the operation's own limit, which the program may have set.
        limits = Limits(settings.dead_after_s, settings.stall_warning_s, 0.0)
        # Not bound to this object, so that the thread does not keep a forgotten group alive.
        failed = _ending(self.watch, self.lanes)
        self._vigil = Vigil(
            self.lanes.orders, hosts, limits, self.watch, progress, failed, self._name, _waits_for
        )
        self._write_timeline(self._vigil, hosts)

    def waits_for(self) -> str:
        """The call in which this rank waits for others of the group; empty if it does not."""
        progress = self._progress()
        if not progress.doing:
            return ""
        return f"in {self._name}: {progress.doing}, call number {progress.number}"

    def _write_timeline(self, bearer: Union[Vigil, OwnTrace], hosts: Sequence[str]) -> None:
        if self._default:
            write_here(bearer)
            if self._settings.timeline and not api.is_initialized():
                self._recording = Recording(bearer, hosts)
                self._recording.start(self._settings.timeline, self._settings.timeline_mark_cycles)

    def say_goodbye(self, reason: str, ok: bool) -> None:
        """Tell the others that this rank leaves; every wait here ends."""
        self._failed = not ok or self.watch.verdict is not None
        if ok and self._recording is not None:
            self._recording.finish()
        if self._vigil is not None:
            self._vigil.stop()
        if self._meeting is not None:
            self._meeting.joined.control.leave(reason, ok)
        self.lanes.calls.wake()
        self.lanes.engine.wake()

    def close(self, wait: bool) -> None:
        """Close the links. The rank that serves the rendezvous goes on serving until all others have left.

        Args:
            wait: until then.
        """
        self.lanes.close()
        if self._recording is not None:
            self._recording.close()
        if self._meeting is not None:
            self._meeting.end(wait, self._failed)


def _waits_for() -> str:
    """What this process waits for in any group; not in the one that asks, to whose call it has not come."""
    with _companies_lock:  # a thread of another group's may ask while this one is made
        companies = list(_companies)
    return "; ".join(filter(None, (company.waits_for() for company in companies)))


def _ending(watch: GroupWatch, lanes: Lanes) -> Callable[[RingcommError], None]:
    def failed(error: RingcommError) -> None:
        watch.end(error)
        lanes.calls.wake()
        lanes.engine.wake()

    return failed
