"""An engine's lines to the others: messages, signs of life, and the timeline's events among them."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Tuple

from ..clock import Clock
from ..transport.base import Fabric, Watch
from ..wire.messages import Message
from .liveness import Liveness
from .mailbox import Mailbox
from .tracing import Tracing

Lost = Callable[[int, str, str], BaseException]
"""(peer, why, kind): makes the error to raise for a peer that is gone."""


class Stopped(Exception):
    """The engine is to end."""


class StopWatch(Watch):
    """Interrupts the engine's waits when it is to end, besides what interrupts all waits."""

    def __init__(self, inner: Optional[Watch]) -> None:
        self.stopping = False
        self.pulse: Optional[Callable[[], None]] = None
        self._inner = inner

    def fileno(self) -> int:
        return self._inner.fileno() if self._inner is not None else -1

    def check(self) -> None:
        if self.stopping:
            raise Stopped
        if self._inner is not None:
            self._inner.check()
        if self.pulse is not None:
            self.pulse()


class Lines:
    """Between rank 0 and every other rank. Used by the engine's thread.

    Args:
        fabric: the links for orders.
        dead_after_s: silence of this length means death; 0: never.
        lost: makes the error for a silent peer.
        clock: seconds.
    """

    def __init__(self, fabric: Fabric, dead_after_s: float, lost: Lost, clock: Clock) -> None:
        peers = peers_of(fabric.rank, fabric.size)
        self.mailbox = Mailbox(fabric, peers)
        self.tracing = Tracing(self.mailbox, fabric.rank)
        self._liveness = Liveness(peers, dead_after_s, clock())
        self.lost = lost
        self._clock = clock
        self._received: List[Tuple[int, Message]] = []
        self.interval_s = self._liveness.interval_s

    def pulse(self) -> None:
        """Hear the others, and be heard; also in the middle of a long transfer.

        Raises:
            RingcommError: somebody has been silent for too long.
        """
        now_s = self._clock()
        for peer, message in self.mailbox.receive():
            self._liveness.heard(peer, now_s)
            if message["type"] != "beat" and not self.tracing.take(peer, message):
                self._received.append((peer, message))
        for peer in self.mailbox.gone:
            self._liveness.left(peer)
        if self._liveness.due(now_s):
            self.mailbox.send({"type": "beat"})
        silent = self._liveness.silent(now_s)
        if silent is not None:
            why = (
                f"not a sign of life for {silent[1]:.0f} s: its process is stopped, swapped out or cut off, "
                "or a C call keeps the interpreter lock (RINGCOMM_DEAD_AFTER sets the limit)"
            )
            raise self.lost(silent[0], why, "stalled")

    def take_received(self) -> Sequence[Tuple[int, Message]]:
        """What has arrived for the engine itself."""
        received, self._received = self._received, []
        return received

    def alarm_s(self) -> float:
        """In how many seconds :meth:`pulse` or the timeline has something to do."""
        now_s = self._clock()
        trace_s = self.tracing.alarm_s(now_s)
        alarm_s = self._liveness.alarm_s(now_s)
        return alarm_s if trace_s is None else min(alarm_s, trace_s)


def peers_of(rank: int, size: int) -> List[int]:
    """Whom the lines lead to: from rank 0 to all others, from any other to rank 0."""
    return list(range(1, size)) if rank == 0 else [0]
