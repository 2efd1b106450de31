"""A process group's transport: its links, its failure detector and its timeline.

:class:`~._group.ProcessGroupRingcomm` makes one, and calls :meth:`GroupTransport.watch_over` once it can
report progress, and at the end :meth:`GroupTransport.say_goodbye`, then :meth:`GroupTransport.close`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Optional, Sequence, Union

from ... import api
from ...collective.progress import Progress
from ...config import Settings
from ...configuration.polling import polling_s
from ...engine.heartbeat import HeartbeatThread
from ...engine.peer_channels import SilenceLimits
from ...engine.single_rank import OwnTrace
from ...errors import RingcommError
from ...group.abort_watch import GroupWatch
from ...job.timeline import Recording
from ...transport.base import Channels
from ...transport.tcp import SocketFabric
from ._store import GroupRendezvous, meet
from ._trace import write_here

_transports: weakref.WeakSet[GroupTransport] = weakref.WeakSet()
_transports_lock = threading.Lock()


class GroupTransport:
    """Connects the ranks of a group, and monitors the links.

    Args:
        store: the group's part of PyTorch's store.
        rank: this process's rank in the group.
        ranks: the ranks of the whole job that the group consists of.
        name: the group's name.
        settings: of the group.
        default: whether it is the group that ``init_process_group`` has made; it writes the timeline.

    Attributes:
        channels: the links, by channel. A process group has no engine: *direct* is for its collectives,
            *background* for its point-to-point messages, *control* for heartbeats.
        watch: aborts waits on the links when the group's rendezvous reports a failure, or after :attr:`end`.
        generation: membership epoch of the group's rendezvous.
        host: the name of this rank's host.
        local_rank: number of the group's ranks before this one on its host.
        end: ends the group's communication on this rank, with an error that waits and later calls raise.
        spin_s: how long to poll before sleeping, in seconds.

    Raises:
        StartupError: (or a subclass) the ranks of the group did not connect.
    """

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], name: str, settings: Settings, default: bool
    ) -> None:
        self.generation, self.spin_s, self.host, self.local_rank = 0, 0.0, "localhost", 0
        self.channels = Channels(*(SocketFabric(0, {}) for _ in Channels._fields))
        numbers = ", ".join(map(str, ranks))
        self._name = "the default process group" if default else f"process group {name} (ranks {numbers})"
        self._failed = False
        self._default = default
        self._settings = settings
        self._rendezvous: Optional[GroupRendezvous] = None
        self._detector: Optional[HeartbeatThread] = None
        self._recording: Optional[Recording] = None
        self._progress: Callable[[], Progress] = Progress
        control = None
        if len(ranks) > 1:
            self._rendezvous = meet(store, rank, ranks, name, settings)
            joined = self._rendezvous.joined
            self.generation, control, self.channels = joined.generation, joined.control, joined.channels
            own, self.host = joined.peers[rank].host_index, joined.peers[rank].host
            here = [number for number, peer in enumerate(joined.peers) if peer.host_index == own]
            self.spin_s, self.local_rank = polling_s(settings, len(here)), here.index(rank)
        self.watch = GroupWatch(control, ranks)
        for fabric in (self.channels.direct, self.channels.background):
            fabric.watch = self.watch
            fabric.make_wakeable()
        # Not a bound method: the detector's thread must not keep an unused group alive.
        self.end = _failure_handler(self.watch, self.channels)

    def watch_over(self, progress: Callable[[], Progress]) -> None:
        """Start the failure detector (heartbeats), and the timeline if it is configured.

        Args:
            progress: returns this rank's progress in its collectives.
        """
        if self._rendezvous is None:
            self._write_timeline(OwnTrace(), [self.host])
            return
        self._progress = progress
        with _transports_lock:
            _transports.add(self)
        settings, hosts = self._settings, [peer.host for peer in self._rendezvous.joined.peers]
        # A late rank is reported by the operation's own time limit, which the program may have set.
        limits = SilenceLimits(settings.dead_after_s, settings.stall_warning_s, 0.0)
        self._detector = HeartbeatThread(
            self.channels.control, hosts, limits, self.watch, progress, self.end, self._name, _waits_for
        )
        self._write_timeline(self._detector, hosts)

    def waits_for(self) -> str:
        """Return the call in which this rank waits for the group's other ranks; empty if it does not wait."""
        progress = self._progress()
        if not progress.doing:
            return ""
        return f"in {self._name}: {progress.doing}, call number {progress.number}"

    def _write_timeline(self, source: Union[HeartbeatThread, OwnTrace], hosts: Sequence[str]) -> None:
        if self._default:
            write_here(source)
            if self._settings.timeline and not api.is_initialized():
                self._recording = Recording(source, hosts)
                self._recording.start(self._settings.timeline, self._settings.timeline_mark_cycles)

    def say_goodbye(self, reason: str, ok: bool) -> None:
        """Report to the other ranks that this rank leaves, and end all waits of this rank.

        Args:
            reason: appears in the other ranks' errors.
            ok: False after a failure.
        """
        self._failed = not ok or self.watch.abort_error is not None
        if ok and self._recording is not None:
            self._recording.finish()
        if self._detector is not None:
            self._detector.stop()
        if self._rendezvous is not None:
            self._rendezvous.joined.control.leave(reason, ok)
        self.channels.direct.wake()
        self.channels.background.wake()

    def close(self, wait: bool) -> None:
        """Close the links. The rank that serves the rendezvous serves it until all other ranks have left.

        Args:
            wait: whether to wait for that.
        """
        self.channels.close()
        if self._recording is not None:
            self._recording.close()
        if self._rendezvous is not None:
            self._rendezvous.end(wait, self._failed)


def _waits_for() -> str:
    """Return the calls in which this process waits, in all groups, for a group that waits for this rank."""
    with _transports_lock:  # another group's thread may read it while this group is made
        transports = list(_transports)
    return "; ".join(filter(None, (transport.waits_for() for transport in transports)))


def _failure_handler(watch: GroupWatch, channels: Channels) -> Callable[[RingcommError], None]:
    def failed(error: RingcommError) -> None:
        watch.end(error)
        channels.direct.wake()
        channels.background.wake()

    return failed
