"""Some of the ranks of a fabric, renumbered."""

from __future__ import annotations

from typing import List, Sequence

from .base import Fabric, Link, Views


class _Renumbered(Link):
    """A link under another number."""

    __slots__ = ("link",)

    def __init__(self, peer: int, link: Link) -> None:
        self.peer = peer
        self.link = link
        self.segment_bytes = link.segment_bytes
        self.burst_bytes = link.burst_bytes
        self.peeks = link.peeks
        # Bound directly, without a call in between, because they are for latency-critical packets.
        self.send_packet = link.send_packet  # type: ignore[method-assign]
        self.recv_packet = link.recv_packet  # type: ignore[method-assign]
        self.peek = link.peek  # type: ignore[method-assign]
        self.skip = link.skip  # type: ignore[method-assign]

    @property
    def carrier(self) -> str:
        return self.link.carrier

    def send(self, views: Views) -> int:
        return self.link.send(views)

    def recv(self, views: Views) -> int:
        return self.link.recv(views)

    def settled(self) -> bool:
        return self.link.settled()

    def revoke(self) -> None:
        self.link.revoke()

    def close(self) -> None:
        self.link.close()


class Subset(Fabric):
    """The links among some ranks, without owning them. The n-th of ``ranks`` (ascending) has the number n."""

    def __init__(self, fabric: Fabric, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(fabric.rank)
        self.size = len(self.ranks)
        self.watch = fabric.watch
        self._fabric = fabric
        self._links = {
            number: _Renumbered(number, fabric.link(rank))
            for number, rank in enumerate(self.ranks)
            if rank != fabric.rank
        }

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def rank_of(self, peer: int) -> int:
        return self.ranks[peer]

    def prepare(self, address: int, nbytes: int) -> None:
        self._fabric.prepare(address, nbytes)

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        self._fabric.wait(self._inner(reading), self._inner(writing), timeout_s)

    def _inner(self, links: Sequence[Link]) -> List[Link]:
        return [self._links[link.peer].link for link in links]

    def make_wakeable(self) -> None:
        self._fabric.make_wakeable()

    def wake(self) -> None:
        self._fabric.wake()

    def close(self) -> None:
        """Do nothing: the links belong to the whole fabric."""
