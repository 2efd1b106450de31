"""Ranks that wait for each other: found from what ranks report about their waits, and a clock. Pure.

A rank reports that it is blocked: all its threads wait for operations, and perhaps (*for good*) no thread is
left that could submit anything. A blocked rank goes on only if one of its own operations ends, and those end
only by responses of rank 0. So a report remains true until rank 0 completes or fails an operation that the
rank has announced (:meth:`BlockedRanks.will_go_on`), or the rank itself reports something else. Responses
about operations of other ranks change nothing for it, however many there are.

A rank may also be blocked in a direct call, which needs ranks that have not entered it. They cannot enter it
as long as they are blocked, so such a call is one more operation that lacks them. It may end without any
response, and then none of the ranks that it needs is missing: the report does not count from then on.

If some ranks are blocked for good, and each operation that one of them has announced lacks another one of
them, none of their operations can become complete: the missing announcement would have to come from a rank
that cannot submit anything before one of its own operations ends. That does not depend on what other ranks
do, so it needs no time in which these are quiet, but only that each of the ranks has been blocked without a
change for :data:`DEADLOCK_S`. If all ranks are blocked, but not all for good, it is a stall like any other
until nothing has changed for :data:`BUSY_FACTOR` times the time until a warning.
"""

from __future__ import annotations

import re
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)  # fmt: skip

from ..wire.signature import Key, Signature, first_difference

DEADLOCK_S = 0.5
"""How long ranks must have waited for each other, with no thread left that could submit anything, before they
are told so."""
BUSY_FACTOR = 2.0
"""How many times ``stall_warning_s`` they must have waited if other threads live, which may still submit
what is missing."""

EVERY_RANK, NO_RANK = -1, -2  # what a direct call needs, if not one rank; see :attr:`.Progress.root`

Operations = Iterable[Tuple[Collection[int], Collection[int]]]
"""Of each incomplete operation, the ranks that have announced it, and those that it lacks."""


def behind(waits: Mapping[int, Collection[int]]) -> List[int]:
    """Return the ranks that others wait for and that do not wait; ``waits`` is by waiting rank."""
    return sorted({other for others in waits.values() for other in others}.difference(waits))


def waiting_for_each_other(blocked: Collection[int], operations: Operations) -> Set[int]:
    """Return the blocked ranks of which none can go on before another one of them does."""
    stuck = set(blocked)
    waits = [(stuck.intersection(announced), stuck.intersection(lacks)) for announced, lacks in operations]
    while True:
        waiting = {rank for announced, _ in waits for rank in announced}
        released = {rank for announced, lacks in waits if not lacks & stuck for rank in announced}
        left = (stuck & waiting) - released
        if left == stuck:
            return stuck
        stuck = left


class Deadlock(NamedTuple):
    """Ranks that wait for each other; of ``busy`` ones other threads do not. ``calls`` are direct ones."""

    ranks: Collection[int]
    busy: List[int]
    waited_s: float
    calls: Mapping[int, str] = {}


class _Blocked(NamedTuple):
    """See :class:`.stacks.BlockedReport`."""

    for_good: bool
    since_s: float
    calls: int
    doing: str
    needs: int


class BlockedRanks:
    """Which ranks are blocked, and since when: their ``reports``."""

    def __init__(self, size: int, stall_warning_s: float) -> None:
        self._size = size
        self._stall_warning_s = stall_warning_s
        self.reports: Dict[int, _Blocked] = {}
        self._counts_from: Dict[int, int] = {}
        self.issued = 0  # responses
        self.changed_s = 0.0  # when a rank has sent something after which ranks that wait may go on
        self.look_at_s: Optional[float] = None  # when :meth:`find` may find something

    def blocked(
        self, rank: int, for_good: bool, heard: int, now_s: float, calls: int = 0, call: Sequence[Any] = ()
    ) -> None:
        """Take a rank's report, unless it had not ``heard`` a response about an operation of its own."""
        before = self.reports.get(rank)
        doing, needs = call or ("", NO_RANK)
        item = _Blocked(for_good, now_s, calls, str(doing), int(needs))
        if heard < self._counts_from.get(rank, 0) or (before and before._replace(since_s=now_s) == item):
            return
        self.reports[rank] = item
        at_s = now_s + DEADLOCK_S
        self.look_at_s = at_s if self.look_at_s is None else min(self.look_at_s, at_s)

    def goes_on(self, rank: int) -> None:
        """A rank has submitted something, or reports that it is no longer blocked."""
        self.reports.pop(rank, None)

    def will_go_on(self, ranks: Collection[int]) -> None:
        """Note that operations of these ranks end, or may run, from the next response on."""
        self._counts_from.update(dict.fromkeys(ranks, self.issued + 1))
        for rank in ranks if self.reports else ():
            self.reports.pop(rank, None)

    def find(
        self, joined: Collection[int], ready: bool, paused: bool, operations: Callable[[], Operations],
        now_s: float,
    ) -> Optional[Deadlock]:  # fmt: skip
        """Return the ranks that wait for each other, once it is time, after a rank has become blocked."""
        if self.look_at_s is None or now_s < self.look_at_s:
            return None
        self.look_at_s = None
        blocked = {rank for rank, item in self.reports.items() if item.for_good and rank not in joined}
        direct = [((rank,), self._lacks(rank)) for rank in blocked if self.reports[rank].doing]
        stuck: Collection[int] = waiting_for_each_other(blocked, [*operations(), *direct])
        busy: List[int] = []
        if stuck:
            at_s = max(self.reports[rank].since_s for rank in stuck) + DEADLOCK_S
        else:
            stuck = range(self._size)
            busy = sorted(rank for rank, item in self.reports.items() if not item.for_good)
            limit_s = 0.0 if paused or ready else BUSY_FACTOR * self._stall_warning_s
            if not (busy and limit_s and all(self._waits(rank) or rank in joined for rank in stuck)):
                return None
            at_s = self.changed_s + limit_s
        if now_s < at_s:
            self.look_at_s = at_s
            return None
        waited_s = now_s - (self.changed_s if busy else at_s - DEADLOCK_S)
        calls = {rank: item.doing for rank, item in self.reports.items() if rank in stuck and item.doing}
        return Deadlock(stuck, busy, waited_s, calls)

    def _lacks(self, rank: int) -> List[int]:
        """Blocked ranks that have not entered the direct call in which this rank waits."""
        item = self.reports[rank]
        needed: Iterable[int] = self.reports if item.needs == EVERY_RANK else (item.needs,)
        return [
            other for other in needed if other in self.reports and self.reports[other].calls < item.calls
        ]

    def _waits(self, rank: int) -> bool:
        """Return whether a rank is blocked, and not in a direct call that goes on without blocked ranks."""
        return rank in self.reports and (not self.reports[rank].doing or bool(self._lacks(rank)))


# ---- texts about ranks that disagree, or do not come -----------------------------------------------------


def ranks_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Like ``ranks 1 (jetson1) and 2 (jetson2)``."""
    names = [f"{rank} ({hosts[rank]})" for rank in ranks[:8]]
    if len(ranks) > 8:
        names.append(f"{len(ranks) - 8} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def mismatch_text(
    what: str, signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]
) -> str:
    """Return what every rank is told when the same operation is not the same everywhere."""
    some = list(signatures.values())
    field, _, differing = first_difference(some)
    kind = f"{some[0].verb} " if field in ("root", "shapes") else ""
    differing = f"{kind}{differing or 'calls'}"
    return f"Mismatched {differing} for the operation {what}: {calls_text(signatures, sites, hosts)}."


def calls_text(signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]) -> str:
    """Return which ranks made which call, and where; ranks with the same call are named together."""
    alike: Dict[str, List[int]] = {}
    for rank in sorted(signatures):
        site = f" at {sites[rank]}" if sites.get(rank) else ""
        name = f" named {signatures[rank].name!r}" if signatures[rank].name else ""
        alike.setdefault(f"{signatures[rank].describe(named=False)}{name}{site}", []).append(rank)
    return "; ".join(f"{ranks_text(ranks, hosts)}: {call}" for call, ranks in alike.items())


def deadlock_text(
    found: Deadlock, calls: Iterable[Tuple[Mapping[int, Signature], Mapping[int, str]]], hosts: Sequence[str]
) -> str:
    """Return what ranks are told that wait for each other; ``calls`` are of the operations that fail."""
    signatures: Dict[int, Signature] = {}
    sites: Dict[int, str] = {}
    for announced, places in calls:
        for rank in announced.keys() - signatures.keys():
            signatures[rank], sites[rank] = announced[rank], places[rank]
    what = "every rank waits for something that the others have not called"
    if len(found.ranks) < len(hosts):
        some = ranks_text(sorted(found.ranks), hosts)
        what = f"{some} wait for each other, each for something that another one of them has not called"
    text = f"Mismatched calls: {what}: {calls_text(signatures, sites, hosts)}."
    if found.calls:
        direct = sorted(found.calls.items())
        others = "; ".join(f"{ranks_text([rank], hosts)}: {call}" for rank, call in direct)
        text = (
            f"{text[:-1]}; {others}, which returns the result itself and is matched by order, not by name. "
            "Every rank has to make the same kind of call."
        )
    if found.busy:
        text += (
            f" (Other threads of {ranks_text(found.busy, hosts)} could still call it, but no thread has "
            f"called anything for {found.waited_s:.0f} s, {10 * BUSY_FACTOR:g} % of RINGCOMM_LATE_AFTER.)"
        )
    return text


_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)


def whereabouts(rank: int, host: str, stack: str) -> str:
    """Return what is logged of a rank that does not come: where its main thread is."""
    return f"Rank {rank} ({host}), for which others wait, is here:\n{stack}"


def last_seen_text(
    missing: Sequence[int], last: Mapping[int, Tuple[Signature, Key, float]], stacks: Mapping[int, str],
    now_s: float,
) -> str:  # fmt: skip
    """Return what is known of ranks that have not come to an operation; of the first six only."""
    seen = []
    for rank in missing[:6]:
        if rank in last:
            signature, key, when_s = last[rank]
            seen.append(
                f"rank {rank} last submitted {signature.describe(named=False)} {key}, "
                f"{now_s - when_s:.0f} s ago"
            )
        else:
            seen.append(f"rank {rank} has submitted nothing yet")
        frames = _FRAME.findall(stacks.get(rank, ""))
        if frames:
            seen.append("its main thread was last seen at {}:{}".format(*frames[-1]))
    return "; ".join(seen)
