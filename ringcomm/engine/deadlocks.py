"""Ranks that wait for each other: found from what ranks report about their waits, and a clock. Pure.

A rank reports that it is blocked: all its threads wait for operations, and perhaps (*for good*) no thread is
left that could submit anything. A blocked rank goes on only if one of its own operations ends, and those end
only by responses of rank 0. So a report remains true until rank 0 completes or fails an operation that the
rank has announced (:meth:`BlockedRanks.will_go_on`), or the rank itself reports something else. Responses
about operations of other ranks change nothing for it, however many there are.

**All ranks.** If every rank is blocked and nothing is ready, no operation can end any more.

**Some ranks.** If each of them is blocked for good, and each operation that one of them has announced lacks
another one of them, none of their operations can become complete: the missing announcement would have to come
from a rank that cannot submit anything before one of its own operations ends. That does not depend on what
other ranks do, so it needs no time in which these are quiet, but only that each of the ranks has been blocked
without a change for :data:`DEADLOCK_S`.
"""

from __future__ import annotations

from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Tuple

from .mismatch import waiting_for_each_other

DEADLOCK_S = 0.5
"""How long ranks must have waited for each other, with no thread left that could submit anything, before they
are told so."""
PATIENCE = 2.0
"""How many times ``stall_warning_s`` they must have waited if other threads live, which may still submit
what is missing."""

Operations = Iterable[Tuple[Collection[int], Collection[int]]]
"""Of each incomplete operation, the ranks that have announced it, and those that it lacks."""


class Deadlock(NamedTuple):
    """Ranks that wait for each other.

    Attributes:
        ranks: those ranks.
        busy: those of them in which other threads do not wait.
        waited_s: for how long nothing has changed.
    """

    ranks: Collection[int]
    busy: List[int]
    waited_s: float


class _Blocked(NamedTuple):
    for_good: bool
    since_s: float


class BlockedRanks:
    """Which ranks are blocked, and since when.

    Args:
        size: number of ranks.
        stall_warning_s: after how long a missing rank is worth a warning; 0: never.
    """

    def __init__(self, size: int, stall_warning_s: float) -> None:
        self._size = size
        self._stall_warning_s = stall_warning_s
        self._blocked: Dict[int, _Blocked] = {}
        self._counts_from: Dict[int, int] = {}
        self._changed_s = 0.0
        self._looked_at = -1.0  # value of changed_s when all ranks were last looked at
        self._given_up_s: Optional[float] = None
        self._look_at_s: Optional[float] = None  # when to look at some ranks

    def changed(self, now_s: float) -> None:
        """A rank has sent something after which ranks that wait may go on."""
        self._changed_s = now_s

    def blocked(self, rank: int, for_good: bool, heard: int, now_s: float) -> None:
        """A rank reports that all its threads wait.

        Args:
            rank: the rank.
            for_good: whether no thread is left that could submit anything.
            heard: number of responses that it had executed by then. If one that it had not executed contains
                an operation of its own, that may be what it waited for.
        """
        before = self._blocked.get(rank)
        if heard < self._counts_from.get(rank, 0) or (before is not None and before.for_good == for_good):
            return
        self._blocked[rank] = _Blocked(for_good, now_s)
        if for_good and self._look_at_s is None:
            self._look_at_s = now_s + DEADLOCK_S

    def goes_on(self, rank: int) -> None:
        """A rank has submitted something, or reports that it is no longer blocked."""
        self._blocked.pop(rank, None)

    def will_go_on(self, ranks: Collection[int], response: int) -> None:
        """Operations of these ranks have ended, or may run.

        Args:
            ranks: that have announced them.
            response: the number of the first response that may contain them. Earlier reports do not count.
        """
        self._counts_from.update(dict.fromkeys(ranks, response))
        for rank in ranks if self._blocked else ():
            self._blocked.pop(rank, None)

    def alarm_s(self, ready: bool) -> Optional[float]:
        """When :meth:`find` may find something although nothing arrives; None: not before.

        Args:
            ready: whether operations are ready.
        """
        times = [at_s for at_s in (self._look_at_s, self._all_at_s(ready)) if at_s is not None]
        return min(times) if times else None

    def find(
        self,
        joined: Collection[int],
        ready: bool,
        paused: bool,
        operations: Callable[[], Operations],
        now_s: float,
    ) -> Optional[Deadlock]:
        """The ranks of which none can go on before another one of them does, if it is time to report them.

        Args:
            joined: ranks that have no more to submit.
            ready: whether operations are ready.
            paused: whether a rank has said that it would be away for long.
            operations: returns the incomplete ones.
            now_s: the time.
        """
        return self._find_all(joined, ready, paused, now_s) or self._find_some(joined, operations, now_s)

    # ---- all ranks ---------------------------------------------------------------------------

    def _all_at_s(self, ready: bool) -> Optional[float]:
        """When to look at all ranks; None: not before something has changed."""
        if not self._blocked or ready:
            return None
        return self._changed_s + DEADLOCK_S if self._looked_at != self._changed_s else self._given_up_s

    def _find_all(
        self, joined: Collection[int], ready: bool, paused: bool, now_s: float
    ) -> Optional[Deadlock]:
        at_s = self._all_at_s(ready)
        if at_s is None or now_s < at_s:
            return None
        stuck = all(rank in self._blocked or rank in joined for rank in range(self._size))
        busy = sorted(rank for rank, item in self._blocked.items() if not item.for_good)
        # Threads live that do not wait: until then it is a stall like any other.
        patience_s = PATIENCE * (0.0 if paused else self._stall_warning_s) if busy else DEADLOCK_S
        self._looked_at = self._changed_s
        self._given_up_s = self._changed_s + patience_s if stuck and patience_s else None
        if self._given_up_s is None or now_s < self._given_up_s:
            return None
        return Deadlock(range(self._size), busy, now_s - self._changed_s)

    # ---- some ranks --------------------------------------------------------------------------

    def _find_some(
        self, joined: Collection[int], operations: Callable[[], Operations], now_s: float
    ) -> Optional[Deadlock]:
        """Looks once after ranks have become blocked: nothing else can make ranks wait for each other."""
        if self._look_at_s is None or now_s < self._look_at_s:
            return None
        self._look_at_s = None
        blocked = {rank for rank, item in self._blocked.items() if item.for_good and rank not in joined}
        stuck = waiting_for_each_other(blocked, operations())
        if not stuck:
            return None
        since_s = max(self._blocked[rank].since_s for rank in stuck)
        if now_s < since_s + DEADLOCK_S:
            self._look_at_s = since_s + DEADLOCK_S
            return None
        return Deadlock(stuck, [], now_s - since_s)
