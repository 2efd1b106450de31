"""Rank 0 decides what runs when: a state machine fed with announcements and a clock.

Every rank announces what its program has submitted. As soon as all members of a process set have
announced the same operation it is ready; ready operations are fused into buckets, and every rank is
told to run the same buckets in the same order. What ranks disagree about fails on all of them, with
one text, and nothing else is touched.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..collective.reduce import NO_WEIGHTS, Total
from ..configuration.settings import FUSION_BYTES
from ..errors import ProtocolError, RingcommError
from ..ops import Collective, ReduceOp
from ..wire.messages import Message
from ..wire.signature import Key, Signature
from .deadlocks import (
    BlockedRanks,
    deadlock_text,
    last_seen_text,
    mismatch_text,
    ranks_text,
    whereabouts,
)  # fmt: skip
from .observer import Observer
from .process_sets import GLOBAL_SET, ProcessSets, UnknownProcessSetError
from .repeats import At, RepeatPolicy, What, may_repeat
from .request import MAX_NUMBERS, MAX_SITES, settle

_CHANGES = ("ready", "blocked", "unblocked", "joined", "paused", "resumed")
"""Messages after which ranks that wait may get on, as after the begin of a repeat."""


class Tuning(NamedTuple):
    """When operations run, and when ranks that do not come are reported and given up (0 s: never)."""

    fusion_bytes: int = FUSION_BYTES
    cycle_s: float = 0.001  # how long a ready operation waits to be fused
    stall_warning_s: float = 60.0
    stall_limit_s: float = 600.0
    # Says whether every rank may send all elements of some all-reduces to every peer.
    one_round: Callable[[Sequence[Signature]], bool] = lambda signatures: True


FUSIBLE = (Collective.ALLREDUCE, Collective.REDUCESCATTER, Collective.ALLGATHER)


class Ready(NamedTuple):
    """An operation that is ready on every rank; ``more`` is what ranks are told of it besides."""

    signature: Signature
    number: int
    nbytes: int
    more: Dict[str, Any]


def fuse(ready: Sequence[Ready], threshold_bytes: int) -> List[List[Ready]]:
    """Divide operations into buckets, in their order; each joins the last bucket alike if there is room."""
    buckets: List[List[Ready]] = []
    open_buckets: Dict[Tuple[object, ...], Tuple[List[Ready], int]] = {}
    for member in ready:
        signature, nbytes = member.signature, member.nbytes
        if signature.kind not in FUSIBLE or signature.op == ReduceOp.ADASUM or not threshold_bytes:
            buckets.append([member])
            continue
        alike = (
            signature.kind, signature.process_set, signature.op,
            signature.prescale, signature.postscale, signature.weighted, frozenset(signature.dtypes),
            signature.codec,
        )  # fmt: skip
        bucket, filled = open_buckets.get(alike, ([], 0))
        if not bucket or filled + nbytes > threshold_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(member)
        open_buckets[alike] = (bucket, filled + nbytes)
    return buckets


class Announced:
    """An operation that some ranks have announced, each from its ``sites``. ``reported_s``: when it was last
    reported as waiting. ``values`` are those of a short operation, by rank. ``absent`` has a bit for each
    part that no rank so far has (joined ranks have none), and ``waited_for`` says whether a caller waited for
    it on every rank so far.
    """

    __slots__ = (
        "absent", "first_s", "key", "last_s", "members", "reported_s", "signatures", "sites", "values",
        "waited_for", "weights",
    )  # fmt: skip

    def __init__(self, key: Key, members: Tuple[int, ...], now_s: float) -> None:
        self.key = key
        self.members = members
        self.first_s = self.reported_s = self.last_s = now_s
        self.signatures: Dict[int, Signature] = {}
        self.sites: Dict[int, str] = {}
        self.values: Dict[int, str] = {}
        self.weights: Dict[int, float] = {}
        self.absent = -1
        self.waited_for = True

    @property
    def what(self) -> str:
        """The operation in words."""
        return f"{next(iter(self.signatures.values())).describe(named=False)} {self.key}"


class _Next:
    """What the next responses will contain, but for the numbers of signatures."""

    def __init__(self) -> None:
        self.ready: List[Ready] = []
        self.ready_bytes = 0
        self.since_s = 0.0  # when the first one became ready
        self.urgent = False  # a caller waits for something
        self.settled: List[Tuple[Key, Signature, str]] = []
        self.failed: List[List[Any]] = []
        self.waited_for = True  # everything, by a caller on every rank


class RankReports:
    """What rank 0 knows of the ranks besides their operations, and what is to be said and asked about them.
    ``late_s`` are seconds by rank for which operations have waited for it alone.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.warnings: List[str] = []
        self.to_explain: List[int] = []
        self.paused: Dict[int, str] = {}
        self.late_s: Dict[int, float] = {}
        self.lines: Dict[int, List[str]] = {rank: [""] for rank in range(len(hosts))}
        self.last: Dict[int, Tuple[Signature, Key, float]] = {}
        self.stacks: Dict[int, str] = {}
        self._hosts = hosts
        self._late_until_s = 0.0

    def warn(self, text: str, ranks: Sequence[int]) -> None:
        """Point out that these ranks do not come, and ask them where they are."""
        self.warnings.append(text)
        self.to_explain += [rank for rank in ranks if rank not in self.to_explain]

    def take_stack(self, rank: int, text: str) -> None:
        self.stacks[rank] = text
        self.warnings.append(whereabouts(rank, self._hosts[rank], text))

    def stack_of(self, rank: int) -> str:
        text = self.stacks.get(rank)
        return "" if text is None else f"Its main thread was last seen here:\n{text.rstrip()}"

    def waited_for(self, rank: int, since_s: float, now_s: float) -> None:
        """Operations have waited for this rank alone since then; what others have waited meanwhile is one."""
        late_s = now_s - max(since_s, self._late_until_s)
        if late_s > 0.0:
            self.late_s[rank] = self.late_s.get(rank, 0.0) + late_s
            self._late_until_s = now_s

    def stall_text(self, entry: Announced, missing: Sequence[int], now_s: float) -> str:
        """Return what is said of an operation to which some ranks do not come."""
        waiting = sorted(entry.signatures)
        site = entry.sites[waiting[0]]
        seen = last_seen_text(missing, self.last, self.stacks, now_s)
        return (
            f"{entry.what}{' at ' + site if site else ''} has waited for {now_s - entry.first_s:.0f} s on "
            f"{ranks_text(waiting, self._hosts)} for {ranks_text(missing, self._hosts)} ({seen})"
        )


class _Numbers:
    """Gives signatures numbers, so that ranks announce what has been seen before with a few bytes."""

    def __init__(self) -> None:
        self.signatures: Dict[int, Signature] = {}
        self.numbers: Dict[Signature, int] = {}

    def of(self, signature: Signature, fresh: List[List[Any]]) -> int:
        """Return a signature's number; a new one is added to ``fresh``, of which the ranks are told."""
        number = self.numbers.get(signature)
        if number is not None:
            return number
        number = len(self.numbers) + 1
        if number <= MAX_NUMBERS:
            self.numbers[signature], self.signatures[number] = number, signature
        else:  # for these responses only
            number = MAX_NUMBERS + 1 + len(fresh)
        fresh.append([number, signature.to_json()])
        return number


class Coordinator:
    """Collects announcements and issues responses: which operations run, in which order. ``to_all`` are
    messages to all ranks that precede responses; ``deadlock`` describes one that ends the job.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        members: Callable[[int], Tuple[int, ...]],
        tuning: Tuning = Tuning(),  # noqa: B008 - a tuple of constants
    ) -> None:
        self.deadlock = ""
        self.observer: Optional[Observer] = None
        self.repeats = RepeatPolicy(len(hosts))
        self.reports = RankReports(hosts)
        self.to_all: List[Message] = []
        self._blocked = BlockedRanks(len(hosts), tuning.stall_warning_s)
        self._entries: Dict[Tuple[int, str, int], Announced] = {}
        self._hosts = hosts
        self._joined: List[int] = []
        self._members = members
        self._next = _Next()
        self._numbers = _Numbers()
        self._tuning = tuning

    # ---- announcements -----------------------------------------------------------------------

    def take(self, rank: int, message: Message, now_s: float) -> None:
        """Take a message of a rank; ProtocolError: that rank runs another version or is broken."""
        kind = message["type"]
        take = _TAKE.get(kind)
        if take is None:
            raise ProtocolError(f"rank {rank} may not send {kind!r} to rank 0")
        if kind in _CHANGES:
            self._blocked.changed_s = now_s
        try:
            take(self, rank, message, now_s)
        except (LookupError, ValueError, TypeError, OverflowError) as problem:
            if isinstance(problem, RingcommError):
                raise
            raise ProtocolError(
                f"Rank {rank} ({self._hosts[rank]}) sent a message of kind {kind!r} that makes no sense "
                f"here: {problem!r}."
            ) from None

    def _take_ready(self, rank: int, message: Message, now_s: float) -> None:
        lines, urgent, numbered = self.reports.lines[rank], bool(message["urgent"]), self._numbers.signatures
        lines += map(str, message["sites"][: 1 + MAX_SITES - len(lines)])
        for what, number, line, *more in message["operations"]:
            signature = numbered[what] if type(what) is int else Signature.from_json(what)
            site, details, absent, weight = lines[line], more[0] if more else {}, 0, 0.0
            if details or signature.weighted:
                weight = float(details["weight"]) if signature.weighted else 0.0
                if not 0.0 <= weight < inf:
                    raise ValueError(f"a weight of {weight}")
                absent = int(details.get("absent", "0"), 16)
            entry = self._entry(rank, signature, number, now_s)
            if entry is None:
                continue
            entry.signatures[rank], entry.sites[rank] = signature, site
            entry.waited_for = entry.waited_for and urgent
            entry.absent &= absent
            if signature.weighted:
                entry.weights[rank] = weight
            if "values" in details:
                entry.values[rank] = details["values"]
            self.reports.last[rank] = signature, entry.key, now_s
            if len(entry.signatures) == len(self._hosts):
                self.reports.waited_for(rank, entry.last_s, now_s)
            entry.last_s = now_s
            if len(entry.signatures) >= len(entry.members) - len(self._joined):
                self._complete(entry, now_s)
        self._next.urgent = self._next.urgent or urgent
        self._blocked.goes_on(rank)

    def _entry(self, rank: int, signature: Signature, number: int, now_s: float) -> Optional[Announced]:
        """Return the operation that a rank announces; None if its process set has been removed meanwhile."""
        entry = self._entries.get((signature.process_set, signature.name, number))
        if entry is None:
            key = Key(signature.process_set, signature.name, number)
            try:
                members = self._members(key.process_set)
            except UnknownProcessSetError as problem:
                self._next.failed.append([list(key), "mismatch", str(problem), []])
                return None
            if rank not in members or type(number) is not int:
                raise ValueError("no member of the process set, or no number")
            entry = self._entries[key] = Announced(key, members, now_s)
        elif rank not in entry.members:
            raise ValueError("no member of the process set")
        if self.observer is not None:
            self.observer.announced(entry.key, rank, signature)
        return entry

    def _take_blocked(self, rank: int, message: Message, now_s: float) -> None:
        numbers = bool(message["for_good"]), int(message["heard"]), now_s, int(message["calls"])
        self._blocked.blocked(rank, *numbers, message["call"])

    def repeat_begun(self, rank: int, at: At, what: What, now_s: float) -> None:
        self._blocked.changed_s = now_s
        if self._blocked.reports:
            self._blocked.goes_on(rank)
        late_s = self.repeats.begun(rank, at, what, now_s)
        if late_s > 0.0:
            self.reports.waited_for(rank, now_s - late_s, now_s)

    def _take_joined(self, rank: int, message: Message, now_s: float) -> None:
        self._joined.append(rank)
        for entry in list(self._entries.values()):
            self._complete(entry, now_s)

    def _take_stuck(self, rank: int, message: Message, now_s: float) -> None:
        if message["epoch"] == self.repeats.epoch:
            self.repeats.want_stop()

    def _take_stopped(self, rank: int, message: Message, now_s: float) -> None:
        go_on = self.repeats.stopped(rank, message)
        if go_on is not None:
            self.to_all.append(go_on)

    def _complete(self, entry: Announced, now_s: float) -> None:
        """Move an operation on if all members have announced it, or have joined."""
        missing: List[int] = []
        if len(entry.signatures) < len(entry.members):
            missing = [rank for rank in entry.members if rank not in entry.signatures]
            if not self._joined or not set(missing).issubset(self._joined):
                return
        self._remove(entry)
        if self.observer is not None:
            self.observer.negotiated(entry.key)
        first = next(iter(entry.signatures.values()))
        if len(set(entry.signatures.values())) > 1:
            self._fail(entry, mismatch_text(str(entry.key), entry.signatures, entry.sites, self._hosts))
        elif missing and not _works_with_joined(first):
            self._fail(
                entry,
                f"{entry.what} needs every rank, but {ranks_text(missing, self._hosts)} called join() "
                "before. Only barrier and allreduce work then, a product without a prescale factor (for "
                "sparse gradients: sparse_as_dense=True).",
            )
        elif first.weighted and not any(entry.weights.values()):
            self._fail(entry, f"{entry.what}: {NO_WEIGHTS}")
        else:
            self._go_on(entry, first, now_s)

    def _go_on(self, entry: Announced, first: Signature, now_s: float) -> None:
        """All members agree on an operation: settle it, or have it executed."""
        coming = self._next
        coming.waited_for = coming.waited_for and entry.waited_for
        if len(entry.values) == len(entry.members):
            value = settle(first, entry.members, entry.values, entry.weights)
            coming.settled.append((entry.key, first, value))
            return
        more: Dict[str, Any] = {}
        if first.weighted:
            more["total"] = Total.of(entry.weights.values())
        if entry.absent:
            more["absent"] = format(entry.absent, "x")
        if not coming.ready:
            coming.since_s = now_s
        nbytes = _nbytes(first)
        coming.ready.append(Ready(first, entry.key.number, nbytes, more))
        coming.ready_bytes += nbytes
        if first.kind == Collective.PROCESS_SET:
            self._fail_all_of(ProcessSets.removed_by(first.name))

    def _fail_all_of(self, removed: Tuple[int, ...]) -> None:
        """A process set is removed: what only some of its ranks have announced cannot become ready."""
        for entry in list(self._entries.values()):
            if entry.key.process_set > GLOBAL_SET and entry.members == removed:
                self._remove(entry)
                missing = ranks_text(self._missing(entry), self._hosts)
                self._fail(
                    entry,
                    f"{entry.what} was not submitted by {missing} before remove_process_set() was called: "
                    "wait for all operations of a process set first.",
                )

    def _remove(self, entry: Announced) -> None:
        """An operation is complete, or fails: ranks that have announced it may go on after the response."""
        del self._entries[entry.key]
        self._blocked.will_go_on(entry.signatures)

    def _fail(self, entry: Announced, text: str, kind: str = "mismatch", missing: Sequence[int] = ()) -> None:
        self._next.failed.append([list(entry.key), kind, text, list(missing)])

    def _missing(self, entry: Announced) -> List[int]:
        return [rank for rank in entry.members if rank not in entry.signatures and rank not in self._joined]

    def waits_for(self, ranks: Collection[int]) -> bool:
        """Return whether an operation is missing one of these ranks."""
        return not set(ranks).isdisjoint(self.repeats.unstopped()) or any(
            rank not in entry.signatures and rank in entry.members
            for entry in self._entries.values()
            for rank in ranks
        )

    # ---- responses ---------------------------------------------------------------------------

    def decide(self, now_s: float) -> Optional[Message]:
        """The next responses for all ranks, if any are due."""
        if self._entries:
            self._look_for_deadlock(now_s)
            self._look_for_stalls(now_s)
        self._look_at_repeats(now_s)
        coming, ready = self._next, self._next.ready
        all_joined = len(self._joined) == len(self._hosts)
        if not (coming.failed or all_joined or (ready and self._due(now_s))):
            if not coming.settled:
                return None
            ready = []
        fresh: List[List[Any]] = []
        responses: Message = {
            "type": "responses",
            "fresh": fresh,
            "settled": [
                [self._numbers.of(signature, fresh), key.number, packed]
                for key, signature, packed in coming.settled
            ],
            "run": [self._run(bucket, fresh) for bucket in fuse(ready, self._tuning.fusion_bytes)],
            "failed": coming.failed,
            "joined": self._joined[-1] if all_joined else -1,
            "repeats": self._to_repeat(ready, fresh),
        }
        if all_joined:
            self._joined.clear()
            self._blocked.will_go_on(range(len(self._hosts)))
        self._blocked.issued += 1
        if ready:
            self._next = _Next()
        else:
            coming.settled, coming.failed, coming.waited_for = [], [], True
            if coming.ready:  # left for later responses
                self._blocked.will_go_on(range(len(self._hosts)))
        return responses

    def _run(self, bucket: Sequence[Ready], fresh: List[List[Any]]) -> List[List[Any]]:
        run: List[List[Any]] = []
        for item in bucket:
            number = self._numbers.of(item.signature, fresh)
            run.append([number, item.number, item.more] if item.more else [number, item.number])
        return run

    def _due(self, now_s: float) -> bool:
        coming, tuning = self._next, self._tuning
        late = now_s - coming.since_s >= tuning.cycle_s
        return coming.urgent or late or coming.ready_bytes >= tuning.fusion_bytes

    def _to_repeat(self, ready: Sequence[Ready], fresh: List[List[Any]]) -> List[List[Any]]:
        """Return what is not negotiated from now on, if that is what these responses contain."""
        coming = self._next
        if coming.failed or self._joined or self._entries or len(ready) < len(coming.ready):
            return []
        signatures = [item.signature for item in ready] + [item[1] for item in coming.settled]
        nbytes = coming.ready_bytes + sum([_nbytes(item[1]) for item in coming.settled])
        if self.observer is not None or not may_repeat(signatures, len(self._hosts), nbytes):
            return []
        if any(item.more for item in ready) or not self._tuning.one_round(signatures):
            return []
        number = self.repeats.negotiated(signatures, coming.waited_for)
        ids = [self._numbers.of(signature, fresh) for signature in signatures]
        return [[self.repeats.epoch, number, ids]] if number else []

    def _look_at_repeats(self, now_s: float) -> None:
        """Stop repeats to which a rank does not come because it waits for something else."""
        if self.repeats.active and (self._entries or self._joined):
            joined = [(self._joined, [rank for rank in range(len(self._hosts)) if rank not in self._joined])]
            self.repeats.look([*self._incomplete(), *(joined if self._joined else ())])
        stop = self.repeats.stop(now_s)
        if stop is not None:
            self.to_all.append(stop)
        since_s, limit_s = self.repeats.since_s, self._tuning.stall_limit_s
        if since_s is not None and limit_s and now_s - since_s >= limit_s:
            silent = ranks_text(self.repeats.unstopped(), self._hosts)
            self.deadlock = (
                f"{silent} did not answer rank 0 for {now_s - since_s:.0f} s, after a rank had not come to "
                "operations that repeat in every step"
            )

    def next_alarm_s(self, now_s: float) -> Optional[float]:
        """In how many seconds :meth:`decide` may have something to say although nothing arrives."""
        alarms: List[float] = []
        coming, tuning, entries = self._next, self._tuning, self._entries.values()
        if coming.ready:
            alarms.append(coming.since_s + tuning.cycle_s)
        if entries:
            if self._blocked.look_at_s is not None:
                alarms.append(self._blocked.look_at_s)
            if tuning.stall_warning_s:
                alarms.append(min([entry.reported_s for entry in entries]) + tuning.stall_warning_s)
            if tuning.stall_limit_s:
                alarms.append(min([entry.first_s for entry in entries]) + tuning.stall_limit_s)
        if self.repeats.active and (entries or self._joined):
            alarms.append(now_s)
        if self.repeats.since_s is not None and tuning.stall_limit_s:
            alarms.append(self.repeats.since_s + tuning.stall_limit_s)
        return max(0.0, min(alarms) - now_s) if alarms else None

    # ---- what never becomes ready ------------------------------------------------------------

    def _look_for_deadlock(self, now_s: float) -> None:
        """Fail what ranks wait for if none of them can go on before another one of them does."""
        ready, paused = bool(self._next.ready), bool(self.reports.paused)
        found = self._blocked.find(self._joined, ready, paused, self._incomplete, now_s)
        if found is None:
            return
        failing = [
            entry for entry in self._entries.values() if not entry.signatures.keys().isdisjoint(found.ranks)
        ]
        calls = [(entry.signatures, entry.sites) for entry in failing]
        text = deadlock_text(found, calls, self._hosts)
        self.deadlock = text if found.calls else ""
        for entry in failing:
            self._fail(entry, text)
            self._remove(entry)
        self._blocked.will_go_on(found.ranks)

    def _incomplete(self) -> List[Tuple[Collection[int], Collection[int]]]:
        return [(entry.signatures, self._missing(entry)) for entry in self._entries.values()]

    def _look_for_stalls(self, now_s: float) -> None:
        reports, warning_s, limit_s = self.reports, self._tuning.stall_warning_s, self._tuning.stall_limit_s
        for entry in list(self._entries.values()):
            warn = bool(warning_s) and now_s - entry.reported_s >= warning_s
            give_up = bool(limit_s) and now_s - entry.first_s >= limit_s
            if not (warn or give_up or reports.paused):
                continue
            missing = self._missing(entry)
            if any(rank in reports.paused for rank in missing):
                entry.first_s = entry.reported_s = now_s  # It said that it would be away.
            elif give_up:
                self._remove(entry)
                text = f"{reports.stall_text(entry, missing, now_s)}, and is given up."
                self._fail(entry, text, "stalled", missing)
            elif warn:
                entry.reported_s = now_s
                reports.warn(f"{reports.stall_text(entry, missing, now_s)}.", missing)


def _works_with_joined(signature: Signature) -> bool:
    """Return whether ranks that have joined have a neutral contribution."""
    if signature.op == ReduceOp.PRODUCT and signature.prescale != 1.0:
        return False
    return signature.kind in (Collective.ALLREDUCE, Collective.BARRIER)


@lru_cache(maxsize=MAX_NUMBERS)
def _nbytes(signature: Signature) -> int:
    return signature.nbytes


_TAKE: Dict[str, Callable[[Coordinator, int, Message, float], Any]] = {
    "ready": Coordinator._take_ready,
    "blocked": Coordinator._take_blocked,
    "unblocked": lambda self, rank, message, now_s: self._blocked.goes_on(rank),
    "joined": Coordinator._take_joined,
    "paused": lambda self, rank, message, now_s: self.reports.paused.update({rank: str(message["reason"])}),
    "resumed": lambda self, rank, message, now_s: self.reports.paused.pop(rank, None),
    "stack": lambda self, rank, message, now_s: self.reports.take_stack(rank, str(message["text"])),
    "stuck": Coordinator._take_stuck,
    "stopped": Coordinator._take_stopped,
}
