"""Rank 0 decides what runs when: a state machine fed with announcements and a clock.

Every rank announces what its program has submitted. As soon as all members of a process set have
announced the same operation it is ready; ready operations are fused into buckets, and every rank is
told to run the same buckets in the same order. What ranks disagree about fails on all of them, with
one text, and nothing else is touched.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..collective.weighted import Total
from ..configuration.bucket_sizes import FUSION_BYTES
from ..errors import ProtocolError, RingcommError
from ..ops import Collective, ReduceOp
from ..wire.messages import Message
from ..wire.signature import Key, Signature
from .announcements import Announced, Announcement, announcements, masks_as_text, no_weight_text
from .cache import IssuedIds
from .deadlocks import BUSY_FACTOR, BlockedRanks
from .fusion import Ready, fuse
from .mismatch import deadlock_text, last_seen_text, mismatch_text, ranks_text, whereabouts
from .piggyback import settle
from .process_sets import GLOBAL_SET, ProcessSets, UnknownProcessSetError
from .repeats import RepeatPolicy, may_repeat
from .request import MAX_SITES

_CHANGES = ("ready", "blocked", "unblocked", "joined", "paused", "resumed", "repeat")
"""Messages after which ranks that wait may get on; after the others they wait as before."""


def _works_with_joined(signature: Signature) -> bool:
    """Return whether ranks that have joined have a neutral contribution."""
    if signature.op == ReduceOp.PRODUCT and signature.prescale != 1.0:
        return False
    return signature.kind in (Collective.ALLREDUCE, Collective.BARRIER)


class Tuning(NamedTuple):
    """What may change while the job runs; ``cycle_s``: how long a ready operation waits to be fused."""

    fusion_bytes: int = FUSION_BYTES
    cycle_s: float = 0.001


class Coordinator:
    """Collects announcements and issues responses: which operations run, in which order.

    ``members`` returns the ranks of a process set by its number. ``one_round`` says whether every rank may
    send all elements of some all-reduces to every peer. Limits of 0 s mean never.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        members: Callable[[int], Tuple[int, ...]],
        tuning: Optional[Tuning] = None,
        stall_warning_s: float = 60.0,
        stall_limit_s: float = 600.0,
        most_ids: int = 4096,
        one_round: Callable[[Sequence[Signature]], bool] = lambda signatures: True,
    ) -> None:
        self.tuning = tuning or Tuning()
        self.warnings: List[str] = []
        self.to_explain: List[int] = []
        self.deadlock = ""
        self.on_announce: Optional[Callable[[Key, int, Signature], None]] = None
        self.on_complete: Optional[Callable[[Key], None]] = None
        self._hosts = hosts
        self._size = len(hosts)
        self._members = members
        self._stall_warning_s = stall_warning_s
        self._stall_limit_s = stall_limit_s
        self._ids = IssuedIds(self._size, most_ids)
        self._entries: Dict[Key, Announced] = {}
        self._ready: List[Tuple[Key, Signature]] = []
        self._totals: Dict[Key, Total] = {}
        self._absent: Dict[Key, int] = {}
        self._ready_since_s = 0.0
        self._settled: List[Tuple[Key, Signature, str]] = []
        self._urgent = False
        self._failed: List[List[Any]] = []
        self._joined: Dict[int, None] = {}
        self._last_joined = -1
        self._blocked = BlockedRanks(self._size, stall_warning_s)
        self._issued = 0  # responses
        self._lines: Dict[int, List[str]] = {}
        self._last: Dict[int, Tuple[Signature, Key, float]] = {}
        self.paused: Dict[int, str] = {}
        self._stacks: Dict[int, str] = {}
        self.late_s: Dict[int, float] = {}
        self._late_until_s = 0.0
        self.repeats = RepeatPolicy(self._size)
        self.to_all: List[Message] = []
        self._one_round = one_round
        self._waited_for = True  # everything in the next responses, by a caller on every rank

    # ---- announcements -----------------------------------------------------------------------

    def take(self, rank: int, message: Message, now_s: float) -> None:
        """Take a message of a rank; ProtocolError: that rank runs another version or is broken."""
        try:
            self._take(rank, message, now_s)
        except (LookupError, ValueError, TypeError, OverflowError) as problem:
            if isinstance(problem, RingcommError):
                raise
            raise ProtocolError(
                f"Rank {rank} ({self._hosts[rank]}) sent a message of kind {message['type']!r} that makes no "
                f"sense here: {problem!r}."
            ) from None

    def _take(self, rank: int, message: Message, now_s: float) -> None:
        kind = message["type"]
        take = _TAKE.get(kind)
        if take is None:
            raise ProtocolError(f"rank {rank} may not send {kind!r} to rank 0")
        if kind in _CHANGES:
            self._blocked.changed(now_s)
        take(self, rank, message, now_s)

    def _take_ready(self, rank: int, message: Message, now_s: float) -> None:
        lines = self._lines.setdefault(rank, [""])
        lines += map(str, message["sites"][: 1 + MAX_SITES - len(lines)])
        urgent = bool(message["urgent"])
        for announcement in announcements(message, self._ids, lines):
            self._announce(rank, announcement, now_s, urgent)
        self._urgent = self._urgent or urgent
        self._blocked.goes_on(rank)

    def _take_blocked(self, rank: int, message: Message, now_s: float) -> None:
        numbers = bool(message["for_good"]), int(message["heard"]), now_s, int(message["calls"])
        self._blocked.blocked(rank, *numbers, message["call"])

    def _take_unblocked(self, rank: int, message: Message, now_s: float) -> None:
        self._blocked.goes_on(rank)

    def _take_joined(self, rank: int, message: Message, now_s: float) -> None:
        self._joined[rank] = None
        self._last_joined = rank
        for entry in list(self._entries.values()):
            self._complete(entry, now_s)

    def _take_paused(self, rank: int, message: Message, now_s: float) -> None:
        self.paused[rank] = str(message["reason"])

    def _take_resumed(self, rank: int, message: Message, now_s: float) -> None:
        self.paused.pop(rank, None)

    def _take_stack(self, rank: int, message: Message, now_s: float) -> None:
        self._stacks[rank] = str(message["text"])
        self.warnings.append(whereabouts(rank, self._hosts[rank], self._stacks[rank]))

    def _take_forgot(self, rank: int, message: Message, now_s: float) -> None:
        self._ids.confirm(rank, int(message["epoch"]))

    def _take_repeat(self, rank: int, message: Message, now_s: float) -> None:
        self._blocked.goes_on(rank)
        late_s = self.repeats.begun(rank, message, now_s)
        if late_s > 0.0:
            self.late_s[rank] = self.late_s.get(rank, 0.0) + late_s

    def _take_stuck(self, rank: int, message: Message, now_s: float) -> None:
        if message["epoch"] == self.repeats.epoch:
            self.repeats.want_stop()

    def _take_stopped(self, rank: int, message: Message, now_s: float) -> None:
        go_on = self.repeats.stopped(rank, message)
        if go_on is not None:
            self.to_all.append(go_on)

    def _announce(self, rank: int, announcement: Announcement, now_s: float, urgent: bool) -> None:
        signature = announcement.signature
        key = signature.key(announcement.number)
        if self.on_announce is not None:
            self.on_announce(key, rank, signature)
        entry = self._entries.get(key)
        if entry is None:
            try:
                members = self._members(key.process_set)
            except UnknownProcessSetError as problem:  # it has been removed meanwhile
                self._failed.append([list(key), "mismatch", str(problem), []])
                return
            entry = self._entries[key] = Announced(key, members, now_s)
        entry.add(rank, announcement, urgent)
        self._last[rank] = (signature, key, now_s)
        if len(entry.signatures) == self._size:
            late_s = now_s - max(entry.last_s, self._late_until_s)
            if late_s > 0.0:
                self.late_s[rank] = self.late_s.get(rank, 0.0) + late_s
                self._late_until_s = now_s
        entry.last_s = now_s
        self._complete(entry, now_s)

    def _complete(self, entry: Announced, now_s: float) -> None:
        """Move an operation on once all members have announced it."""
        missing = [rank for rank in entry.members if rank not in entry.signatures]
        if any(rank not in self._joined for rank in missing):
            return
        self._remove(entry)
        if self.on_complete is not None:
            self.on_complete(entry.key)
        first = next(iter(entry.signatures.values()))
        if any(signature != first for signature in entry.signatures.values()):
            self._fail(entry, mismatch_text(str(entry.key), entry.signatures, entry.sites, self._hosts))
        elif missing and not _works_with_joined(first):
            self._fail(
                entry,
                f"{first.describe(named=False)} {entry.key} needs every rank, but "
                f"{ranks_text(missing, self._hosts)} called join() before. Only barrier and allreduce work "
                "then, a product without a prescale factor (for sparse gradients: sparse_as_dense=True).",
            )
        elif first.weighted and not any(entry.weights.values()):
            self._fail(entry, no_weight_text(f"{first.describe(named=False)} {entry.key}"))
        else:
            self._go_on(entry, first, now_s)

    def _go_on(self, entry: Announced, first: Signature, now_s: float) -> None:
        """All members agree on an operation: settle it, or have it executed."""
        self._waited_for = self._waited_for and entry.waited_for
        if len(entry.piggybacked) == len(entry.members):
            value = settle(first, entry.members, entry.piggybacked, entry.weights)
            self._settled.append((entry.key, first, value))
        else:
            if first.weighted:
                self._totals[entry.key] = Total.of(entry.weights.values())
            if entry.absent:
                self._absent[entry.key] = entry.absent
            if not self._ready:
                self._ready_since_s = now_s
            self._ready.append((entry.key, first))
            if first.kind == Collective.PROCESS_SET:
                self._fail_all_of(ProcessSets.removed_by(first.name))

    def _fail_all_of(self, removed: Tuple[int, ...]) -> None:
        """A process set is removed: what only some of its ranks have announced cannot become ready."""
        for entry in list(self._entries.values()):
            if entry.key.process_set > GLOBAL_SET and entry.members == removed:
                self._remove(entry)
                first = next(iter(entry.signatures.values()))
                missing = ranks_text(self._missing(entry), self._hosts)
                self._fail(
                    entry,
                    f"{first.describe(named=False)} {entry.key} was not submitted by {missing} before "
                    "remove_process_set() was called: wait for all operations of a process set first.",
                )

    def _remove(self, entry: Announced) -> None:
        """An operation is complete, or fails: ranks that have announced it may go on after the response."""
        del self._entries[entry.key]
        self._blocked.will_go_on(entry.signatures, self._issued + 1)

    def _fail(self, entry: Announced, text: str, kind: str = "mismatch", missing: Sequence[int] = ()) -> None:
        self._failed.append([list(entry.key), kind, text, list(missing)])

    def waits_for(self, ranks: Collection[int]) -> bool:
        """Return whether an operation is missing one of these ranks."""
        unstopped = self.repeats.unstopped()
        return any(rank in unstopped for rank in ranks) or any(
            rank not in entry.signatures and rank in entry.members
            for entry in self._entries.values()
            for rank in ranks
        )

    # ---- responses ---------------------------------------------------------------------------

    def decide(self, now_s: float) -> Optional[Message]:
        """The next responses for all ranks, if any are due."""
        self._look_for_deadlock(now_s)
        self._look_for_stalls(now_s)
        self._look_at_repeats(now_s)
        joined = -1
        if len(self._joined) == self._size:
            joined = self._last_joined
        full = self._ids.full
        ready: List[Tuple[Key, Signature]] = []
        if self._failed or joined >= 0 or full or (self._ready and self._due(now_s)):
            ready, self._ready = self._ready, []
            self._urgent = False
        elif not self._settled:
            return None
        fresh: List[List[Any]] = []
        members = [Ready(self._number(signature, fresh), key.number, signature) for key, signature in ready]
        buckets = fuse(members, self.tuning.fusion_bytes)
        keys = [item.signature.key(item.number) for bucket in buckets for item in bucket]
        message: Message = {
            "type": "responses",
            "fresh": fresh,
            "settled": [
                [self._number(signature, fresh), key.number, packed]
                for key, signature, packed in self._settled
            ],
            "run": [[value for item in bucket for value in (item.id, item.number)] for bucket in buckets],
            "totals": [self._totals.pop(key) for key in keys if key in self._totals],
            "absent": masks_as_text([self._absent.pop(key, 0) for key in keys]),
            "failed": self._failed,
            "joined": joined,
            "forget": 0,
            "repeats": self._to_repeat(members, joined, fresh),
        }
        if full:
            message["forget"] = self._ids.withdraw()
        if joined >= 0:
            self._joined.clear()
            self._blocked.will_go_on(range(self._size), self._issued + 1)
        self._issued += 1
        if self._ready:  # left for later responses
            self._blocked.will_go_on(range(self._size), self._issued + 1)
        self._failed, self._settled, self._waited_for = [], [], True
        return message

    def _to_repeat(self, members: Sequence[Ready], joined: int, fresh: List[List[Any]]) -> List[List[Any]]:
        """Return what is not negotiated from now on, if that is what these responses contain."""
        alone = not (self._failed or self._joined or self._entries or self._ready or joined >= 0)
        if not alone or self._absent or self.on_announce is not None:
            return []
        signatures = [item.signature for item in members] + [item[1] for item in self._settled]
        if not may_repeat(signatures, self._size) or not self._one_round(signatures):
            return []
        number = self.repeats.negotiated(signatures, self._waited_for)
        ids = [self._number(signature, fresh) for signature in signatures]
        return [[self.repeats.epoch, number, ids]] if number else []

    def _look_at_repeats(self, now_s: float) -> None:
        """Stop repeats to which a rank does not come because it waits for something else."""
        if self.repeats.active and (self._entries or self._joined):
            joined = [(self._joined, [rank for rank in range(self._size) if rank not in self._joined])]
            self.repeats.look([*self._incomplete(), *(joined if self._joined else ())])
        stop = self.repeats.stop(now_s)
        if stop is not None:
            self.to_all.append(stop)

    def _number(self, signature: Signature, fresh: List[List[Any]]) -> int:
        """The number of a signature; if it has none it gets one, of which the ranks must be told."""
        number = self._ids.id_of(signature)
        if number is None:
            number = self._ids.issue(signature)
            fresh.append([number, signature.to_json()])
        return number

    def _due(self, now_s: float) -> bool:
        if self._urgent or now_s - self._ready_since_s >= self.tuning.cycle_s:
            return True
        return sum(signature.nbytes for _, signature in self._ready) >= self.tuning.fusion_bytes

    def next_alarm_s(self, now_s: float) -> Optional[float]:
        """In how many seconds :meth:`decide` may have something to say although nothing arrives."""
        alarms: List[float] = []
        if self._ready:
            alarms.append(self._ready_since_s + self.tuning.cycle_s)
        if self._entries:
            deadlock_at_s = self._blocked.alarm_s(bool(self._ready))
            if deadlock_at_s is not None:
                alarms.append(deadlock_at_s)
            if self._stall_warning_s:
                alarms.append(min(e.reported_s for e in self._entries.values()) + self._stall_warning_s)
            if self._stall_limit_s:
                alarms.append(min(e.first_s for e in self._entries.values()) + self._stall_limit_s)
        if self.repeats.active and (self._entries or self._joined):
            alarms.append(now_s)
        if self.repeats.since_s is not None and self._stall_limit_s:
            alarms.append(self.repeats.since_s + self._stall_limit_s)
        return max(0.0, min(alarms) - now_s) if alarms else None

    # ---- what never becomes ready ------------------------------------------------------------

    def _look_for_deadlock(self, now_s: float) -> None:
        """Fail what ranks wait for if none of them can go on before another one of them does."""
        if not self._entries:
            return
        ready, paused = bool(self._ready), bool(self.paused)
        found = self._blocked.find(self._joined, ready, paused, self._incomplete, now_s)
        if found is None:
            return
        stuck = found.ranks
        failing = [entry for entry in self._entries.values() if not entry.signatures.keys().isdisjoint(stuck)]
        calls = [(entry.signatures, entry.sites) for entry in failing]
        text = deadlock_text(stuck, calls, self._hosts, found.busy, found.waited_s, BUSY_FACTOR, found.calls)
        self.deadlock = text if found.calls else ""
        for entry in failing:
            self._fail(entry, text)
            self._remove(entry)
        self._blocked.will_go_on(stuck, self._issued + 1)

    def _incomplete(self) -> List[Tuple[Collection[int], Collection[int]]]:
        return [(entry.signatures, self._missing(entry)) for entry in self._entries.values()]

    def _look_for_stalls(self, now_s: float) -> None:
        since_s, limit_s = self.repeats.since_s, self._stall_limit_s
        if since_s is not None and limit_s and now_s - since_s >= limit_s:
            silent = ranks_text(self.repeats.unstopped(), self._hosts)
            self.deadlock = (
                f"{silent} did not answer rank 0 for {now_s - since_s:.0f} s, after a rank had not come to "
                "operations that repeat in every step"
            )
        for entry in list(self._entries.values()):
            if self.paused and any(rank in self.paused for rank in self._missing(entry)):
                entry.first_s = entry.reported_s = now_s  # It said that it would be away.
                continue
            waited_s = now_s - entry.first_s
            if self._stall_limit_s and waited_s >= self._stall_limit_s:
                missing = self._missing(entry)
                self._remove(entry)
                text = f"{self._stall_text(entry, missing, now_s)}, and is given up."
                self._fail(entry, text, "stalled", missing)
            elif self._stall_warning_s and now_s - entry.reported_s >= self._stall_warning_s:
                entry.reported_s = now_s
                missing = self._missing(entry)
                self.warnings.append(f"{self._stall_text(entry, missing, now_s)}.")
                self.to_explain += [rank for rank in missing if rank not in self.to_explain]

    def _missing(self, entry: Announced) -> List[int]:
        return [rank for rank in entry.members if rank not in entry.signatures and rank not in self._joined]

    def stack_of(self, rank: int) -> str:
        """Return where a rank's main thread was when it was asked, as a sentence; empty if it was not."""
        if rank not in self._stacks:
            return ""
        return f"Its main thread was last seen here:\n{self._stacks[rank].rstrip()}"

    def _stall_text(self, entry: Announced, missing: Sequence[int], now_s: float) -> str:
        waiting = sorted(entry.signatures)
        what = f"{entry.signatures[waiting[0]].describe(named=False)} {entry.key}"
        site = entry.sites[waiting[0]]
        seen = last_seen_text(missing, self._last, self._stacks, now_s)
        return (
            f"{what}{' at ' + site if site else ''} has waited for {now_s - entry.first_s:.0f} s on "
            f"{ranks_text(waiting, self._hosts)} for {ranks_text(missing, self._hosts)} ({seen})"
        )


_TAKE: Dict[str, Callable[[Coordinator, int, Message, float], None]] = {
    "ready": Coordinator._take_ready,
    "blocked": Coordinator._take_blocked,
    "unblocked": Coordinator._take_unblocked,
    "joined": Coordinator._take_joined,
    "paused": Coordinator._take_paused,
    "resumed": Coordinator._take_resumed,
    "stack": Coordinator._take_stack,
    "forgot": Coordinator._take_forgot,
    "repeat": Coordinator._take_repeat,
    "stuck": Coordinator._take_stuck,
    "stopped": Coordinator._take_stopped,
}
