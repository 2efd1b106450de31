"""Fault injection for the links of any fabric. A seed makes every failure reproducible.

No fault may change a result. Some faults occur on a busy machine: reads and writes that move fewer bytes than
possible, or none, and links that pause for a while. Other faults occur when a cable or a host fails: links
that break in the middle of a byte stream.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from ..transport.base import Fabric, Link, LinkClosed, Views, clipped, flat


class Cut(NamedTuple):
    """A break of the link between two ranks after a number of bytes in one direction.

    Attributes:
        rank: the rank at whose end the bytes are counted.
        peer: the rank at the other end.
        sending: True: count the bytes that ``rank`` sends; False: the bytes that it receives.
        after_bytes: number of bytes that still arrive. The next attempt shows the break.
        silent: True: later bytes of this direction are lost silently, as if a cable were pulled. False: both
            ends get an error.
        turns: number of ticks of the clock for which a silent link holds everything back. Then it continues,
            like TCP when the cable is back. 0: it never continues, and sent bytes are lost.
    """

    rank: int
    peer: int
    sending: bool
    after_bytes: int
    silent: bool = False
    turns: int = 0


@dataclass(frozen=True)
class Faults:
    """The faults to inject, and their frequency.

    Attributes:
        seed: with the numbers of the two ranks, it determines everything that is random.
        would_block: share of calls (0.0 to 1.0) that move nothing although they could.
        short: share of the other calls that move only 1 to ``most_bytes`` bytes.
        most_bytes: the most bytes that a short call moves.
        delay: share of calls after which this direction of the link pauses.
        most_turns: the longest pause in ticks of the clock.
        cuts: the links that break, or become silent.
    """

    seed: int = 0
    would_block: float = 0.2
    short: float = 0.5
    most_bytes: int = 7
    delay: float = 0.0
    most_turns: int = 0
    cuts: Tuple[Cut, ...] = ()


class Turns:
    """A clock that counts ticks (turns of the simulation) instead of seconds."""

    def __init__(self) -> None:
        self.now = 0


class _Direction:
    """The faults of the bytes that go one way over a link."""

    def __init__(self, faults: Faults, turns: Turns, rank: int, peer: int, sending: bool) -> None:
        self._faults = faults
        self._turns = turns
        self._random = random.Random(f"{faults.seed}/{rank}/{peer}/{sending}")
        self._asleep_until = 0
        cuts = [cut for cut in faults.cuts if cut[:3] == (rank, peer, sending)]
        self._cut = min(cuts, key=lambda cut: cut.after_bytes) if cuts else None
        self._left_bytes = self._cut.after_bytes if self._cut is not None else None

    def cut(self) -> Optional[Cut]:
        """Return the cut, once as many bytes have passed."""
        return self._cut if self._left_bytes == 0 else None

    def allowed(self, wanted_bytes: int) -> int:
        """Return how many bytes the next call may move; 0: it would block."""
        if self._turns.now < self._asleep_until:
            return 0
        cut = self.cut()
        if cut is not None and cut.turns:
            self._asleep_until = self._turns.now + cut.turns
            self._left_bytes = None
            return 0
        dice, faults = self._random, self._faults
        if dice.random() < faults.delay:
            self._asleep_until = self._turns.now + dice.randint(1, faults.most_turns)
            return 0
        if dice.random() < faults.would_block:
            return 0
        if dice.random() < faults.short:
            wanted_bytes = min(wanted_bytes, dice.randint(1, faults.most_bytes))
        return wanted_bytes if self._left_bytes is None else min(wanted_bytes, self._left_bytes)

    def count(self, moved_bytes: int) -> None:
        """Record moved bytes."""
        if self._left_bytes is not None:
            self._left_bytes -= moved_bytes


class FaultyLink(Link):
    """A link with the faults that :class:`Faults` describes.

    Attributes:
        held_back: True if the last call in either direction moved nothing because of a fault.
    """

    def __init__(self, link: Link, faults: Faults, turns: Turns, rank: int) -> None:
        self.peer = link.peer
        self.held_back = False
        self._link = link
        self._outward = _Direction(faults, turns, rank, link.peer, sending=True)
        self._inward = _Direction(faults, turns, rank, link.peer, sending=False)
        self._broken = False

    @property
    def carrier(self) -> str:
        return self._link.carrier

    def send(self, views: Views) -> int:
        return self._move(self._outward, self._link.send, views)

    def recv(self, views: Views) -> int:
        return self._move(self._inward, self._link.recv, views)

    def _move(self, direction: _Direction, call: Callable[[Views], int], views: Views) -> int:
        cut, wanted = direction.cut(), sum(view.nbytes for view in views)
        if not self._broken and cut is not None and not cut.silent:
            self._broken = True
            self._link.close()
        if self._broken:
            raise LinkClosed(self.peer, "cut by the test")
        if cut is not None and not cut.turns:  # what is sent gets lost
            return wanted if direction is self._outward else 0
        limit = direction.allowed(wanted)
        if not limit:
            self.held_back = True
            return 0
        moved = call(clipped([flat(view) for view in views], limit))
        direction.count(moved)
        return moved

    def readable(self) -> bool:
        """Return whether :meth:`recv` could return something without the faults. For simulations."""
        return self._broken or self._link.readable()  # type: ignore[attr-defined]

    def writable(self) -> bool:
        """Return whether :meth:`send` could accept something without the faults. For simulations."""
        return self._broken or self._link.writable()  # type: ignore[attr-defined]

    def revoke(self) -> None:
        self._link.revoke()

    def close(self) -> None:
        self._link.close()


class FaultyFabric(Fabric):
    """A fabric (the links of one rank) with faulty links. A wait that a fault has caused ends at once.

    Args:
        fabric: the fabric without faults.
        faults: the faults to inject.
        turns: the clock for delays; it also ticks in every wait. None: a new one.
    """

    def __init__(self, fabric: Fabric, faults: Faults, turns: Optional[Turns] = None) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self.watch = fabric.watch
        self._fabric = fabric
        self._turns = Turns() if turns is None else turns
        self._links: Dict[int, FaultyLink] = {
            peer: FaultyLink(fabric.link(peer), faults, self._turns, self.rank)
            for peer in range(self.size)
            if peer != self.rank
        }

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        self._turns.now += 1
        self._fabric.wait(reading, writing, 0.0 if self.take_held_back() else timeout_s)

    def make_wakeable(self) -> None:
        self._fabric.make_wakeable()

    def wake(self) -> None:
        self._fabric.wake()

    def take_held_back(self) -> bool:
        """Return whether a fault has held back a link since the last call of this method."""
        held_back = [link for link in self._links.values() if link.held_back]
        for link in held_back:
            link.held_back = False
        return bool(held_back)

    def close(self) -> None:
        self._fabric.close()
