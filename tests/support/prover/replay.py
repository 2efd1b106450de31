"""All ranks' schedules replayed together, in symbols.

Instead of numbers, the buffers hold terms: "rank 3's element 17", "the fold of these terms in this
order". The replay follows the rules of :mod:`ringcomm.schedule.steps` in their strictest reading:

* a step touches an element only after all earlier steps of its rank that touch the same element;
* the wire holds nothing: an element leaves only when the other side can take it, where a folding
  ``Recv`` may keep one element per peer until the others' have come;
* the elements between two ranks move strictly in order.

Buffers of an executor only remove waits, so a schedule that passes cannot
deadlock in one that serves all its links at once. A schedule that fails raises
:class:`~ringcomm.errors.BrokenInvariantError`, which names the ranks, steps and elements at fault.

Elements that all steps treat alike are taken together as one *piece*. Every such run is kept as
two pieces, not one, because "its last element waits for its first" can only be seen with two.

Equal terms are stored once and named by a number, so "the same expression, operand order included"
is the comparison of two numbers, and that is what makes the bits the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.schedule.cost import Schedules, Streams
from ringcomm.schedule.steps import DATA, SELF, Bounds, Recv, Send
from tests.support.prover.cuts import Domain, cut_buffers
from tests.support.prover.streams import checked_streams, fail, name_of

_UNDEFINED = -1  # a piece that no step has written


class _Term(NamedTuple):
    """The properties of an expression."""

    ranks: int  # bit r: rank r's contribution is in it
    origin: Tuple[int, int]  # buffer and position of the contributions
    folds: int  # how many folds lie one upon the other
    final: bool
    codings: int = 0  # how many times the longest way from a contribution was encoded
    decoded: bool = False  # whether this is what codes mean, so that sending it again encodes nothing


class _Terms:
    """All expressions that occur; equal ones are one number."""

    def __init__(self, size: int) -> None:
        self.all_ranks = (1 << size) - 1
        self.terms: List[_Term] = []
        self._numbers: Dict[Tuple[int, ...], int] = {}

    def leaf(self, rank: int, buffer: int, position: int) -> int:
        return self._number((-1, rank, buffer, position), _Term(1 << rank, (buffer, position), 0, False))

    def fold(self, operands: List[int], rank: int, index: int, recv: Recv) -> int:
        key = (int(recv.final), *operands)
        if key in self._numbers:
            return self._numbers[key]
        terms = [self.terms[operand] for operand in operands]
        ranks = folds = codings = 0
        wrong = ""
        for term in terms:
            if term.final:
                wrong = "folds a value that is already final"
            elif term.origin != terms[0].origin:
                wrong = f"folds element {term.origin[1]} with element {terms[0].origin[1]}"
            elif ranks & term.ranks:
                wrong = f"counts the contributions of ranks {members(ranks & term.ranks)} twice"
            ranks |= term.ranks
            folds = max(folds, term.folds)
            codings = max(codings, term.codings)
        if not wrong and recv.final and ranks != self.all_ranks:
            wrong = f"is final, but lacks the contributions of ranks {members(self.all_ranks & ~ranks)}"
        if not wrong and not recv.final and ranks == self.all_ranks:
            wrong = "has all contributions, but is not final"
        if wrong:
            fail(f"{name_of(rank, index, recv)} {wrong}")
        return self._number(key, _Term(ranks, terms[0].origin, folds + 1, recv.final, codings))

    def code(self, number: int) -> int:
        """Return what remains of a term that is encoded and decoded."""
        term = self.terms[number]
        if term.decoded:
            return number
        return self._number((-2, number), term._replace(codings=term.codings + 1, decoded=True))

    def _number(self, key: Tuple[int, ...], term: _Term) -> int:
        number = self._numbers.setdefault(key, len(self.terms))
        if number == len(self.terms):
            self.terms.append(term)
        return number


def members(mask: int) -> List[int]:
    """The ranks whose bits are set."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


class _Arrival:
    """One piece of one ``Recv``: it waits for its operands, then for the earlier steps at its place."""

    __slots__ = ("done", "index", "operands", "parked", "place", "recv", "version")

    def __init__(self, place: int, version: int, index: int, recv: Recv) -> None:
        self.place = place
        self.version = version
        self.index = index
        self.recv = recv
        self.operands: Dict[int, int] = {}  # peer -> term
        self.parked: List[_Stream] = []
        self.done = False


class _Stream:
    """The pieces that go from one rank to another: ``moves`` are the sender's (place, version) and the
    receiver's arrival."""

    __slots__ = ("moves", "next", "source", "target")

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.moves: List[Tuple[int, int, _Arrival]] = []
        self.next = 0


class Replay:
    """All buffers of all ranks, cut into pieces (:func:`.cuts.cut_buffers`); a *place* is one piece of one
    buffer. `contributors` is the number of ranks, from 0 on, with contributions; None: all.

    Each place counts the steps that touched it. The *version* that a step needs at a place is the number of
    earlier steps of its rank that touch it, too: when the count has reached it, the step may run.
    """

    def __init__(
        self,
        schedules: Schedules,
        marks: Dict[Domain, Bounds],
        coded: bool = False,
        contributors: Optional[int] = None,
    ) -> None:
        self._schedules = schedules
        self._coded = coded
        self._contributors = len(schedules) if contributors is None else contributors
        self._terms = _Terms(self._contributors)
        pairings = checked_streams(schedules)
        self._position: List[int] = []
        self._place: Dict[Domain, Dict[int, int]] = {}
        for domain, points in cut_buffers(schedules, pairings, marks).items():
            base = len(self._position)
            self._place[domain] = {point: base + i for i, point in enumerate(points)}
            self._position.extend(points)
        self._value = [_UNDEFINED] * len(self._position)
        self._touched = [0] * len(self._position)
        self._waiting: Dict[Tuple[int, int], _Stream] = {}
        self._streams = self._lay_out(pairings)

    def _places(self, rank: int, buffer: int, start: int, stop: int) -> range:
        if start == stop:
            return range(0)
        place = self._place[rank, buffer]
        return range(place[start], place[stop])

    def _lay_out(self, pairings: Streams) -> List[_Stream]:
        """Give every step its version at every place, then write out the streams piece by piece."""
        versions = [0] * len(self._position)
        outgoing: Dict[Tuple[int, int], List[Tuple[int, int]]] = {}
        incoming: Dict[Tuple[int, int], List[_Arrival]] = {}
        for rank, steps in enumerate(self._schedules):
            for index, step in enumerate(steps):
                buffer = step.buffer if isinstance(step, Send) else DATA
                places = self._places(rank, buffer, step.start, step.stop)
                if isinstance(step, Send):
                    outgoing[rank, index] = [(place, versions[place]) for place in places]
                else:
                    incoming[rank, index] = [
                        _Arrival(place, versions[place], index, step) for place in places
                    ]
                for place in places:
                    versions[place] += 1
        streams: List[_Stream] = []
        for (source, target), pairs in pairings.items():
            stream = _Stream(source, target)
            for pair in pairs:
                arrivals = incoming[target, pair.recv_index]
                for (place, version), arrival in zip(outgoing[source, pair.send_index], arrivals):
                    stream.moves.append((place, version, arrival))
            streams.append(stream)
        return streams

    def fill(self, spans: Iterable[Tuple[int, int, int, int]], on: Optional[int] = None) -> None:
        """Define (rank, buffer, start, stop): each element is that rank's contribution, in the memory of the
        rank `on`; None: of that rank.
        """
        for rank, buffer, start, stop in spans:
            for place in self._places(rank if on is None else on, buffer, start, stop):
                self._value[place] = self._terms.leaf(rank, buffer, self._position[place])

    def run(self) -> None:
        """Move everything; fail if something is left that cannot move."""
        ready = deque(self._streams)
        while ready:
            self._advance(ready.popleft(), ready)
        stuck = [stream for stream in self._streams if stream.next < len(stream.moves)]
        if stuck:
            lines = [self._describe(stream) for stream in stuck[:8]]
            more = [f"and {len(stuck) - 8} more streams"] if len(stuck) > 8 else []
            fail("deadlock:\n  " + "\n  ".join(lines + more))

    def _advance(self, stream: _Stream, ready: Deque[_Stream]) -> None:
        """Advance a stream until it has to wait for another stream, which will wake it."""
        while stream.next < len(stream.moves):
            place, version, arrival = stream.moves[stream.next]
            folding = bool(arrival.recv.fold)
            if stream.source not in arrival.operands:
                if self._touched[place] != version:
                    self._waiting[place, version] = stream
                    return
                if folding or self._touched[arrival.place] == arrival.version:
                    value = self._read(place, stream.source)
                    arrival.operands[stream.source] = self._terms.code(value) if self._coded else value
                    self._touch(place, ready)
            if not arrival.done and folding and len(arrival.operands) < len(arrival.recv.peers):
                arrival.parked.append(stream)
                return
            if not arrival.done and self._touched[arrival.place] != arrival.version:
                self._waiting[arrival.place, arrival.version] = stream
                return
            if not arrival.done:
                self._apply(arrival, stream.target)
                self._touch(arrival.place, ready)
                ready.extend(arrival.parked)
            stream.next += 1

    def _touch(self, place: int, ready: Deque[_Stream]) -> None:
        self._touched[place] += 1
        stream = self._waiting.pop((place, self._touched[place]), None)
        if stream is not None:
            ready.append(stream)

    def _read(self, place: int, rank: int) -> int:
        if self._value[place] == _UNDEFINED:
            fail(f"rank {rank} sends element {self._position[place]}, which is undefined")
        return self._value[place]

    def _apply(self, arrival: _Arrival, rank: int) -> None:
        recv = arrival.recv
        arrival.done = True
        if not recv.fold:
            self._value[arrival.place] = arrival.operands[recv.peers[0]]
            return
        own = self._value[arrival.place]
        if own == _UNDEFINED:
            name = name_of(rank, arrival.index, recv)
            fail(f"{name} folds element {self._position[arrival.place]}, which is undefined")
        operands = [own if peer == SELF else arrival.operands[peer] for peer in recv.fold]
        value = self._terms.fold(operands, rank, arrival.index, recv)
        self._value[arrival.place] = self._terms.code(value) if self._coded and recv.final else value

    def _describe(self, stream: _Stream) -> str:
        place, version, arrival = stream.moves[stream.next]
        where = f"rank {stream.source} -> rank {stream.target}, element {self._position[place]}"
        if stream.source not in arrival.operands and self._touched[place] != version:
            return f"{where}: earlier steps of rank {stream.source} have not touched it yet"
        lacking = sorted(set(arrival.recv.peers) - set(arrival.operands) - {stream.source})
        if lacking:
            return f"{where}: {name_of(stream.target, arrival.index, arrival.recv)} waits for ranks {lacking}"
        return f"{where}: {name_of(stream.target, arrival.index, arrival.recv)} waits for earlier steps"

    def expect_reduced(self, rank: int, start: int, stop: int, single_fold: bool) -> None:
        """Fail unless the elements are finished folds of all contributions to their own position."""
        terms, alone = self._terms, self._contributors == 1
        for place in self._places(rank, DATA, start, stop):
            term, position = terms.terms[self._value[place]], self._position[place]
            wrong = ""
            if term.ranks != terms.all_ranks:
                wrong = f"lacks the contributions of ranks {members(terms.all_ranks & ~term.ranks)}"
            elif term.origin != (DATA, position):
                wrong = f"holds the value of element {term.origin[1]}"
            elif not term.final and not alone:
                wrong = "is not final"
            elif single_fold and term.folds > 1:
                wrong = f"is made by {term.folds} folds one upon the other, not by one"
            if wrong:
                fail(f"rank {rank} element {position} {wrong}")

    def expect_coded(self, rank: int, start: int, stop: int) -> None:
        """Fail unless the elements are decoded ones that were encoded at most twice on any way."""
        for place in self._places(rank, DATA, start, stop):
            term, position = self._terms.terms[self._value[place]], self._position[place]
            if not term.decoded or term.codings > 2:
                state = "decoded" if term.decoded else "not decoded"
                fail(f"rank {rank} element {position} is {state} and was encoded {term.codings} times")

    def expect_same(self, start: int, stop: int, ranks: Optional[Sequence[int]] = None) -> None:
        """Fail unless all of these ranks (None: all ranks) hold the same expressions."""
        ranks = range(len(self._schedules)) if ranks is None else ranks
        first = [self._value[place] for place in self._places(ranks[0], DATA, start, stop)]
        for rank in ranks[1:]:
            for place, value in zip(self._places(rank, DATA, start, stop), first):
                if self._value[place] != value:
                    element = self._position[place]
                    pair = f"{ranks[0]} and {rank}"
                    fail(f"ranks {pair} fold element {element} in different order: bits may differ")

    def expect_copy(self, rank: int, start: int, stop: int, origin: Tuple[int, int, int]) -> None:
        """Fail unless the elements are those of (owner, buffer, start)."""
        owner, buffer, base = origin
        for place in self._places(rank, DATA, start, stop):
            position = self._position[place]
            if self._value[place] != self._terms.leaf(owner, buffer, base + position - start):
                fail(f"rank {rank} element {position} is not what rank {owner} had for it")

    def expect_undefined(self, rank: int, start: int, stop: int) -> None:
        """Fail if anything was written there."""
        for place in self._places(rank, DATA, start, stop):
            if self._value[place] != _UNDEFINED:
                fail(f"rank {rank} element {self._position[place]} should not have been touched")
