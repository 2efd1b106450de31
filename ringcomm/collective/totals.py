"""Totals of a runner's calls: numbers of calls, time, bytes, and the ranks it waited for.

Plans count their own runs while calls are made; these sums are made only on request.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from ..wire.signature import Signature


class PeerTotal:
    """The totals of one peer. Sent and received bytes include headers; ``slept_s`` is how long this rank has
    slept until bytes of the peer arrived; ``delivered_bytes`` and ``busy_s`` are the system's counts of TCP
    connections.
    """

    __slots__ = ("delivered_bytes", "busy_s", "received_bytes", "sent_bytes", "slept_s")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.delivered_bytes = 0
        self.slept_s = self.busy_s = 0.0

    def exchanged(self, sent_bytes: int, received_bytes: int) -> None:
        """Add to the sums."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes


class OperationTotal:
    """The totals of equal calls, or of calls of one kind."""

    __slots__ = ("moved_bytes", "runs", "took_s")

    def __init__(self) -> None:
        self.runs = self.moved_bytes = 0
        self.took_s = 0.0

    def add(self, runs: int, took_s: float, moved_bytes: int) -> None:
        """Add to the sums."""
        self.runs += runs
        self.took_s += took_s
        self.moved_bytes += moved_bytes


class Tally:
    """The calls for one purpose: for the engine, which runs equal plans for different tensors. ``label`` is
    the purpose, in the program's terms.
    """

    __slots__ = ("label", "_calls")

    def __init__(self, label: str) -> None:
        self.label = label
        # By the call's id: plans may be dropped.
        self._calls: Dict[int, Tuple[Signature, OperationTotal]] = {}

    def add(self, call: Signature, took_s: float) -> None:
        """Count one run of a call."""
        counted = self._calls.get(id(call))
        if counted is None:
            counted = self._calls[id(call)] = call, OperationTotal()
        counted[1].add(1, took_s, 0)

    def move(self, totals: Totals) -> None:
        """Count these calls under the label in the sums of operations, not under their own descriptions."""
        for call, own in list(self._calls.values()):
            before = totals.operations.get(call.describe())
            if before is None or before.runs <= 0:
                continue
            moved_bytes = before.moved_bytes * own.runs // before.runs
            totals.operations.setdefault(self.label, OperationTotal()).add(own.runs, own.took_s, moved_bytes)
            before.add(-own.runs, -own.took_s, -moved_bytes)
            if before.runs <= 0:
                del totals.operations[call.describe()]


class Totals:
    """Sums over calls."""

    def __init__(self) -> None:
        self.peers: Dict[int, PeerTotal] = {}  # by rank
        self.kinds: Dict[str, OperationTotal] = {}  # by kind, such as ``allreduce``
        self.operations: Dict[str, OperationTotal] = {}  # by the description of the call

    def copy(self) -> Totals:
        """Return another object with the same sums."""
        made = Totals()
        made.merge(self)
        return made

    def merge(self, other: Totals) -> None:
        """Add the sums of another object."""
        for rank, item in list(other.peers.items()):
            self.peer(rank).exchanged(item.sent_bytes, item.received_bytes)
            self.peer(rank).slept_s += item.slept_s
        for mine, theirs in ((self.kinds, other.kinds), (self.operations, other.operations)):
            for name, total in list(theirs.items()):
                mine.setdefault(name, OperationTotal()).add(total.runs, total.took_s, total.moved_bytes)

    def peer(self, rank: int) -> PeerTotal:
        """Return the sums of the exchange with a rank."""
        return self.peers.setdefault(rank, PeerTotal())


def longest(operations: Dict[str, OperationTotal], count: int) -> List[str]:
    """Return the names of the operations that took the most time in total, at most ``count``."""
    return sorted(operations, key=lambda name: -operations[name].took_s)[:count]
