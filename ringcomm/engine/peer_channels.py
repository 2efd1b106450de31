"""An engine's channels to the other engines: control messages, heartbeats, and the timeline's events."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..clock import Clock, Deadline
from ..collective.progress import Progress
from ..group.failures import FailureReporter
from ..transport.base import Fabric, Stopped
from ..wire.messages import Message
from .control_messages import ControlMessages
from .failure_detector import BEATS, FailureDetector
from .progress_reports import CALLS, ENGINE, ProgressReports
from .tracing import Tracing

logger = logging.getLogger("ringcomm.engine")

Lost = Callable[[int, str, str], BaseException]
"""(peer, why, kind): makes the error to raise for a peer that is gone."""

MAX_INTERVAL_S = 5.0
"""Heartbeats are sent at least this often, in seconds, unless no limit depends on them."""

_LOOK_S = 0.002
"""How often to look whether all has been sent, at the end."""
LOOK_AGAIN_S = 0.5
"""How long after a look that has found this rank in a new direct call it looks again, in seconds."""


class SilenceLimits(NamedTuple):
    """How long others may be silent, in seconds; 0: for ever.

    ``dead_after_s``: without a heartbeat or in a transfer that stands still. ``warning_s`` and
    ``late_after_s``: with a rank whose program does not come, before saying so and before giving it up.
    """

    dead_after_s: float = 0.0
    warning_s: float = 0.0
    late_after_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """How often to give heartbeats, so that none of the limits is missed by much."""
        limits_s = [limit_s / BEATS for limit_s in self if limit_s]
        return min(MAX_INTERVAL_S, *limits_s) if limits_s else 3600.0


class PeerChannels:
    """Channels to every other rank, used by the thread that does the engine's work.

    ``waits_in``: how far this rank is in a direct call in which the last two looks have found it.
    """

    def __init__(
        self,
        fabric: Fabric,
        hosts: Sequence[str],
        limits: SilenceLimits,
        lost: Lost,
        progress: Callable[[], Tuple[Progress, Progress]],
        clock: Clock,
    ) -> None:
        self.nearest = nearest_of(fabric.rank, fabric.size)
        self.messages = ControlMessages(fabric, self.nearest)
        self.tracing = Tracing(self.messages, fabric.rank)
        self.interval_s = limits.interval_s
        self.progress_reports = ProgressReports(fabric.rank, hosts, *limits, self.interval_s)
        self.said_goodbye: Set[int] = set()
        self._noted: Set[int] = set()
        self.lost = lost
        peers = [peer for peer in range(fabric.size) if peer != fabric.rank]
        self._rank = fabric.rank
        self._hosts = hosts
        self._detector = FailureDetector(peers, limits.dead_after_s, clock(), self.interval_s)
        self._progress = progress
        self._slow_links = fabric.slow_links
        self._clock = clock
        self._received: List[Tuple[int, Message]] = []
        self._awake = False
        self._next_look_s = 0.0
        self._in_call, self._looks_again = -1, False
        self.waits_in: Optional[Progress] = None

    def awake(self) -> None:
        """Messages may have arrived: the next :meth:`pulse` reads from all peers."""
        self._awake = True

    def pulse(self) -> None:
        """Exchange heartbeats and messages; also in the middle of a long transfer.

        A peer without a heartbeat for too long, or a transfer that stands still, raises.
        """
        now_s = self._clock()
        look = now_s >= self._next_look_s
        all_peers = look or self._awake
        self._awake = False
        for peer, message in self.messages.receive(all_peers):
            self._detector.received(peer, now_s)
            self._receive(peer, message, now_s)
        if look:
            self._look(now_s)

    def _receive(self, peer: int, message: Message, now_s: float) -> None:
        if message["type"] == "beat":
            self.progress_reports.report(peer, CALLS, Progress.from_json(message["calls"]), now_s)
            self.progress_reports.report(peer, ENGINE, Progress.from_json(message["engine"]), now_s)
        elif message["type"] == "bye":
            self.said_goodbye.add(peer)
        elif not self.tracing.take(peer, message):
            self._received.append((peer, message))

    def _look(self, now_s: float) -> None:
        for peer in self.messages.gone:
            self._detector.left(peer)
        calls, engine = self._progress()
        self.progress_reports.report(self._rank, CALLS, calls, now_s)
        self.progress_reports.report(self._rank, ENGINE, engine, now_s)
        for text in self._slow_links() if self._slow_links is not None else ():
            logger.warning("%s", text)
        if self._detector.due(now_s):
            self.messages.send_all({"type": "beat", "calls": calls.to_json(), "engine": engine.to_json()})
        self._next_look_s = now_s + min(self._detector.alarm_s(now_s), self.interval_s / 2)
        before, self._in_call = self._in_call, calls.sequence if calls.doing else -1
        self._looks_again = self._in_call not in (-1, before)
        self.waits_in = calls if self._in_call == before != -1 else None
        if self._looks_again:  # whether it waits in that call is worth a second look
            self._next_look_s = min(self._next_look_s, now_s + LOOK_AGAIN_S)
        silent = self._detector.silent(now_s)
        if silent is not None:
            raise self._silent(*silent)
        stuck = self.progress_reports.stuck(now_s)
        if stuck is not None:
            raise self.lost(stuck[0], stuck[1], "still")

    def doing(self) -> str:
        """The operation that this rank executes now, not at its last heartbeat; empty if none."""
        calls, engine = self._progress()
        if calls.doing or not engine.doing:
            return calls.describe()
        return f"{engine.doing}, {engine.moved_bytes} bytes into it"

    def _silent(self, peer: int, silent_s: float) -> BaseException:
        heard, silent = self._detector.divided(self._clock())
        if not heard and len(silent) > 1:
            why = (
                f"no heartbeat from any rank for {silent_s:.0f} s: its "
                f"host, {self._hosts[self._rank]}, is cut off (RINGCOMM_DEAD_AFTER sets the limit)"
            )
            return self.lost(peer, why, "cut off")
        why = (
            f"no heartbeat for {silent_s:.0f} s: its process is stopped, swapped out or cut off, "
            "or a C call keeps the interpreter lock (RINGCOMM_DEAD_AFTER sets the limit)"
        )
        return self.lost(peer, why, "silent")

    def divided(self) -> Tuple[List[int], List[int]]:
        """(peers with a recent heartbeat, peers without one or with a link that ended without a goodbye)."""
        heard, silent = self._detector.divided(self._clock())
        gone: Dict[int, str] = dict(self.messages.gone)
        return heard, sorted({*silent, *(peer for peer in gone if peer not in self.said_goodbye)})

    def close(self) -> None:
        """Send a goodbye, so that no peer takes the end of the links for a failure."""
        self.messages.send_all({"type": "bye"})
        # These refer to the engine's thread and a runner, and would keep both.
        self._progress = _nowhere
        self.lost = _ended

    def settle(
        self, limit_s: float, waiting: Callable[[], Sequence[Message]], over: Callable[[], Any]
    ) -> None:
        """Wait until what this rank has to say is on its way; on rank 0, until all others have left.

        No other rank has to do anything for it, so none is held up. At most so long, and not if the thread
        that sends is over. For any thread.
        """
        deadline = Deadline(limit_s)
        while not (deadline.expired() or over() or self.settled(waiting())):
            time.sleep(_LOOK_S)

    def settled(self, waiting: Sequence[Message]) -> bool:
        """Return whether there is nothing left for which :meth:`settle` waits."""
        if self._rank == 0:
            return len(self.said_goodbye | set(self.messages.gone)) == len(self._hosts) - 1
        return not waiting and not self.messages.has_unsent()

    def note_closed(self, reporter: FailureReporter) -> None:
        """Report the links that have ended without a goodbye, each of them once."""
        for peer in set(self.messages.gone) - self.said_goodbye - self._noted:
            self._noted.add(peer)
            reporter.note_closed(peer, self.messages.gone[peer])

    def take_received(self) -> Sequence[Tuple[int, Message]]:
        """Return what has arrived for the engine itself."""
        received, self._received = self._received, []
        return received

    def alarm_s(self) -> float:
        """In how many seconds :meth:`pulse` or the timeline has something to do."""
        now_s = self._clock()
        trace_s = self.tracing.alarm_s(now_s)
        alarm_s = self._detector.alarm_s(now_s)
        if self._looks_again:
            alarm_s = min(alarm_s, max(0.0, self._next_look_s - now_s))
        return alarm_s if trace_s is None else min(alarm_s, trace_s)


def _ended(peer: int, why: str, kind: str) -> BaseException:
    return Stopped()


def _nowhere() -> Tuple[Progress, Progress]:
    return Progress(), Progress()


def nearest_of(rank: int, size: int) -> List[int]:
    """The peers of the negotiation: all others for rank 0, rank 0 for any other."""
    return list(range(1, size)) if rank == 0 else [0]
