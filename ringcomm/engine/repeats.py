"""What repeats is not negotiated again: sets of small all-reduces that ranks submit step after step.

Once rank 0 has seen the same set a few times it gives it a number, in its responses. A rank of which exactly
such a set is pending then sends the set's elements to every peer at once, behind a message with
the set's number: a *repeat*. It has ended once the same has come from all peers, and every rank adds up in
the order of the ranks. So a step is one exchange, as with a direct call.

**A promise.** Repeats are numbered. A rank that has begun one waits until it ends or is called off; it begins
no other, and its arrays stay as they are until then. Since every rank needs the elements of all, no rank ends
a repeat that another has not begun.

**Deviations.** A rank of which something else is pending announces it to rank 0, as everything that is not a
repeat. Rank 0 receives all repeats, so it notices that a rank has begun one that another does not come to.
So does a rank that has waited for long, or of which a peer has begun a repeat of another set. Rank 0 then
stops repeats: every rank says which repeat it has begun last, and begins none. If all ranks have begun that
one with the same set, it ends, however late its bytes arrive. Otherwise those that have begun it announce its
operations. Rank 0 tells them which. Sets have to be seen again before they repeat.

:class:`Repeats` is a rank's part, and :class:`RepeatPolicy` rank 0's. Both are fed with messages, and pure.
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import attrgetter
from typing import Collection, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..collective.observe import OperationTotal
from ..collective.reduce import kernel
from ..dtypes import Array, dtype_named
from ..errors import ProtocolError
from ..ops import Collective, ReduceOp
from ..wire.messages import Message
from ..wire.signature import Signature
from .request import Request

MAX_BYTES = 128 * 1024  # of a set, times the number of peers: every rank sends all elements to every peer
TIMES = 2  # so often a set must have been negotiated before it repeats
_MORE_TIMES, _MOST_TIMES = 4, 4096
"""After a rank did something else instead of an early repeat: so many times as often, and at most."""
_MAX_SETS = 64
_MAX_SEEN = 256
_LAST_NUMBER = 1 << 30
_KINDS = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

At = Tuple[int, int]  # (epoch, number) of a repeat
What = Tuple[int, int]
"""What a rank has begun: the number of the set, and of the operation in it that has no name (0: none)."""
Members = FrozenSet[Signature]

_signature_of = attrgetter("signature")


class RepeatedSet:
    """Operations that repeat, in the order in which their elements travel, and what repeats have done."""

    def __init__(self, number: int, signatures: Sequence[Signature], size: int) -> None:
        first = signatures[0]
        dtype = dtype_named(first.dtypes[0])
        self.number, self.signatures = number, tuple(signatures)
        self.fold = kernel(ReduceOp(first.op), dtype, size, first.prescale, first.postscale)
        self.warns = self.fold.warns
        self.nbytes = sum(item.nbytes for item in signatures)
        self.total = OperationTotal()


class Repeat:
    """A repeat that this rank has begun; ``message`` precedes its elements on the way to peers."""

    __slots__ = ("arrived", "at", "differs", "elements", "message", "requests", "set", "what")

    def __init__(self, at: At, chosen: RepeatedSet, requests: Sequence[Request]) -> None:
        self.at, self.set, self.requests = at, chosen, requests
        self.arrived: Dict[int, bytearray] = {}  # elements by peer
        self.differs = False  # a peer has begun something else in place of it, so it cannot end
        count, arrays = 0, []
        for request in requests:
            count = count or request.key.number
            arrays += request.arrays
        self.what = chosen.number, count & (_LAST_NUMBER - 1)
        # A copy: the arrays stay as they are until the end.
        self.elements: Array = arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)
        if chosen.fold.prescale != 1.0:
            with np.errstate(all="ignore"):
                chosen.fold.prepare(self.elements)
        self.message: Message = {
            "type": "repeat", "epoch": at[0], "number": at[1], "set": self.what[0], "count": self.what[1],
            "bytes": self.elements.nbytes,
        }  # fmt: skip

    def take(self, peer: int, what: What, elements: bytearray) -> None:
        """Take the elements of a peer that has begun this repeat, or something else in its place."""
        self.differs = self.differs or what != self.what
        if what == self.what and len(elements) != self.elements.nbytes:
            raise ProtocolError(
                f"rank {peer} sent {len(elements)} bytes for operations that have {self.elements.nbytes}"
            )
        self.arrived[peer] = elements

    def end(self, rank: int) -> None:
        """Overwrite the arrays with the result, once all elements have arrived."""
        operands, fold = [], self.set.fold
        for peer in sorted(self.arrived):
            operands.append(np.frombuffer(self.arrived[peer], self.elements.dtype))
        operands.insert(rank, self.elements)
        with np.errstate(all="ignore") if self.set.warns else nullcontext():
            fold.fold(self.elements, operands, final=True)
        start = 0
        for request in self.requests:
            for array in request.arrays:
                array[:] = self.elements[start : start + array.size]
                start += array.size


class Repeats:
    """A rank's part. Used by the thread that does the engine's work."""

    def __init__(self, rank: int, size: int) -> None:
        self.all_sets: List[RepeatedSet] = []
        self.rank, self.size = rank, size
        self.current: Optional[Repeat] = None
        self._epoch = 0
        self._begun: At = (0, 0)
        self._what: What = (0, 0)  # of the last repeat begun
        self._stopped = False
        self._sets: Dict[Members, RepeatedSet] = {}
        self._early: Dict[int, Dict[At, Tuple[What, bytearray]]] = {}

    def learn(self, epoch: int, number: int, signatures: Sequence[Signature]) -> None:
        """A set of operations repeats from now on."""
        if epoch == self._epoch and not self._stopped:
            learnt = RepeatedSet(number, signatures, self.size)
            self._sets[frozenset(signatures)] = learnt
            self.all_sets.append(learnt)

    def begin(self, pending: Sequence[Request]) -> Optional[Repeat]:
        """Begin a repeat if these requests, and no others, are a set that repeats."""
        if not self._sets or self._stopped or self.current is not None:
            return None
        chosen = self._sets.get(frozenset(map(_signature_of, pending)))
        # Of two without a name the signatures may be equal.
        if chosen is None or len(chosen.signatures) != len(pending):
            return None
        for request in pending:
            if request.absent or request.mirrors:
                return None
        if len(pending) > 1:
            by_signature = {request.signature: request for request in pending}
            pending = [by_signature[item] for item in chosen.signatures]
        self._begun = (self._epoch, self._begun[1] + 1)
        current = self.current = Repeat(self._begun, chosen, pending)
        self._what = current.what
        for peer, early in self._early.items():
            if current.at in early:
                current.take(peer, *early.pop(current.at))
        return current

    def take(self, peer: int, at: At, what: What, elements: bytearray) -> None:
        if self.current is not None and at == self.current.at:
            self.current.take(peer, what, elements)
        elif at[0] >= self._epoch:  # otherwise it was called off
            early = self._early.setdefault(peer, {})
            early[at] = what, elements
            if len(early) > 2:  # the next one, or the first one of the next epoch
                raise ProtocolError(
                    f"rank {peer} has begun repeats that this rank ({self.rank}) has not ended"
                )

    def missing(self) -> List[int]:
        """Return the peers whose elements the current repeat lacks."""
        current = self.current
        if current is None:
            return []
        return [peer for peer in range(self.size) if peer != self.rank and peer not in current.arrived]

    def end(self) -> Optional[Repeat]:
        """Return the current repeat if it has ended, with its results in place."""
        current = self.current
        if current is None or len(current.arrived) < self.size - 1 or current.differs:
            return None
        self.current = None
        current.end(self.rank)
        return current

    def stop(self, epoch: int) -> Message:
        """Begin no more repeats; what rank 0 is told of the last one."""
        self._stopped = True
        number = self._begun[1] if self._begun[0] == epoch else 0
        return {
            "type": "stopped", "epoch": epoch, "number": number, "set": self._what[0],
            "count": self._what[1],
        }  # fmt: skip

    def negotiate(self, epoch: int, last: int) -> Optional[Repeat]:
        """End the stop: repeats up to number ``last`` end; return the current one if it was called off."""
        called_off = None
        # One of an earlier epoch has been begun by all ranks: it ends.
        if self.current is not None and self.current.at[0] == self._epoch and self.current.at[1] > last:
            called_off, self.current = self.current, None
        for early in self._early.values():
            for at in [at for at in early if at[0] < epoch]:
                del early[at]
        self._epoch, self._begun, self._stopped = epoch, (epoch, 0), False
        self._sets.clear()
        return called_off


class RepeatPolicy:
    """Rank 0's part: which sets repeat, and when repeats stop."""

    def __init__(self, size: int) -> None:
        self.epoch = 0
        self.active = False  # some ranks have begun a repeat that others have not
        self.since_s: Optional[float] = None  # when it has told all ranks to stop
        self._size = size
        self._begun: List[At] = [(0, 0)] * size
        self._what_of: What = (0, 0)  # the latest repeat
        self._arrived_s = 0.0
        self._stopped: Dict[int, Tuple[int, What]] = {}
        self._wanted = self._deviated = False
        self._times = TIMES
        self._seen: Dict[Members, int] = {}
        self._sets: Dict[Members, int] = {}
        self._sets_given = 0

    # ---- which sets repeat -------------------------------------------------------------------

    def negotiated(self, signatures: Sequence[Signature], waited: bool) -> int:
        """Note that these operations, which :func:`may_repeat`, are all; return their set's number, or 0."""
        members = frozenset(signatures)
        if self.since_s is not None or not waited:
            return 0
        seen = self._seen.get(members, 0) + 1
        if seen > 1 or len(self._seen) < _MAX_SEEN:
            self._seen[members] = seen
        if seen < self._times or members in self._sets or len(self._sets) >= _MAX_SETS:
            return 0
        self._sets_given += 1
        self._sets[members] = self._sets_given
        return self._sets_given

    # ---- when they stop ----------------------------------------------------------------------

    def begun(self, rank: int, at: At, what: What, now_s: float) -> float:
        """A rank has begun a repeat; return for how long all others have waited for it, in seconds."""
        differs = self._what_of != what and self._begun.count(at) > 0
        self._begun[rank], self._what_of = at, what
        if differs or at[1] >= _LAST_NUMBER:
            self.want_stop(deviated=differs)
        self.active = self._begun.count(at) < self._size
        waited_s = 0.0 if self.active else now_s - self._arrived_s
        self._arrived_s = now_s
        return waited_s

    def want_stop(self, deviated: bool = False) -> None:
        """Repeats must stop: a rank waits for long, or (``deviated``) another one does something else."""
        self._wanted, self._deviated = True, self._deviated or deviated

    def look(self, incomplete: Iterable[Tuple[Collection[int], Collection[int]]]) -> None:
        """Notice that ranks wait for others in something else, and these in a repeat for the former."""
        latest = max(self._begun)
        for waiting, missing in incomplete:
            behind = any(self._begun[rank] < latest for rank in waiting)
            if behind and any(self._begun[rank] == latest for rank in missing):
                self.want_stop(deviated=True)

    def stop(self, now_s: float) -> Optional[Message]:
        wanted, self._wanted = self._wanted, False
        if not wanted or self.since_s is not None or not self._sets:
            return None
        self.since_s = now_s
        self._stopped.clear()
        return {"type": "stop", "epoch": self.epoch}

    def stopped(self, rank: int, message: Message) -> Optional[Message]:
        """A rank has stopped; return what tells all ranks to go on, once the last one has."""
        if message["epoch"] != self.epoch or self.since_s is None:
            raise ValueError("repeats were not stopped")
        self._stopped[rank] = message["number"], (message["set"], message["count"])
        if len(self._stopped) < self._size:
            return None
        numbers = {number for number, _ in self._stopped.values()}
        last = min(numbers)
        agree = len(numbers) > 1 or len(set(self._stopped.values())) == 1
        last = last if agree else last - 1
        if self._deviated:
            # It must be worth it: repeats are stopped at the cost of a few messages.
            self._times = TIMES if last >= self._times else min(_MORE_TIMES * self._times, _MOST_TIMES)
            self._seen.clear()
        self.epoch += 1
        self.since_s, self._deviated = None, False
        self._sets.clear()
        return {"type": "negotiate", "epoch": self.epoch, "last": last}

    def unstopped(self) -> List[int]:
        return [] if self.since_s is None else [r for r in range(self._size) if r not in self._stopped]


def may_repeat(signatures: Sequence[Signature], size: int, nbytes: int) -> bool:
    """Return whether operations may repeat together: small all-reduces of all ranks, reduced alike."""
    if not 0 < nbytes * (size - 1) <= MAX_BYTES or len(set(signatures)) < len(signatures):
        return False
    first = signatures[0]
    alike = {
        (item.kind, item.process_set, item.op, item.prescale, item.postscale, item.codec, item.weighted, name)
        for item in signatures for name in item.dtypes or ("",)
    }  # fmt: skip
    plain = first.kind == Collective.ALLREDUCE and first.op in _KINDS
    plain = plain and not (first.process_set or first.codec or first.weighted)
    return plain and len(alike) == 1 and [item.name for item in signatures].count("") <= 1
