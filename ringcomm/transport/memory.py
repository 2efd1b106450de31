"""Links inside one process: ranks as threads, or as steps of one simulation."""

from __future__ import annotations

import threading
from typing import Dict, List, Sequence

from .base import Channels, Fabric, Link, LinkClosed, Views, flat


class _Exchange(threading.Condition):
    """The lock that all fabrics of one job share, and a count of all changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1
        self.notify_all()


class _Pipe:
    """Bytes in flight from one rank to another, at most ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = bytearray()
        self.closed = False


class MemoryLink(Link):
    """One end of a pair of pipes."""

    carrier = "the memory of this process"

    def __init__(self, peer: int, outward: _Pipe, inward: _Pipe, exchange: _Exchange) -> None:
        self.peer = peer
        self._outward = outward
        self._inward = inward
        self._exchange = exchange

    def send(self, views: Views) -> int:
        with self._exchange:
            if self._outward.closed or self._inward.closed:
                raise LinkClosed(self.peer, "it closed the connection")
            before = len(self._outward.bytes)
            for view in views:
                self._outward.bytes += flat(view)[: self._outward.capacity_bytes - len(self._outward.bytes)]
            taken = len(self._outward.bytes) - before
            if taken:
                self._exchange.changed()
            return taken

    def recv(self, views: Views) -> int:
        with self._exchange:
            given = 0
            for view in views:
                count = min(view.nbytes, len(self._inward.bytes))
                flat(view)[:count] = self._inward.bytes[:count]
                del self._inward.bytes[:count]
                given += count
            if given:
                self._exchange.changed()
            elif any(view.nbytes for view in views):
                if self._inward.closed:
                    raise LinkClosed(self.peer, "it closed the connection")
                if self._outward.closed:
                    raise LinkClosed(self.peer, "this end closed the connection")
            return given

    def readable(self) -> bool:
        """Return whether :meth:`recv` would return bytes or raise. For simulations, which cannot sleep."""
        return bool(self._inward.bytes) or self._inward.closed or self._outward.closed

    def writable(self) -> bool:
        """Return whether :meth:`send` would take bytes or raise. For simulations, which cannot sleep."""
        full = len(self._outward.bytes) >= self._outward.capacity_bytes
        return not full or self._outward.closed or self._inward.closed

    def close(self) -> None:
        with self._exchange:
            self._outward.closed = True
            self._exchange.changed()


class MemoryFabric(Fabric):
    """One rank's end of a job inside this process. Made by :func:`memory_fabrics`."""

    def __init__(self, rank: int, size: int, links: Dict[int, MemoryLink], exchange: _Exchange) -> None:
        self.rank = rank
        self.size = size
        self._links = links
        self._exchange = exchange
        self._seen: Dict[int, int] = {}  # by thread: several may wait

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        with self._exchange:
            ident = threading.get_ident()
            seen = self._seen.get(ident, 0)
            self._exchange.wait_for(lambda: self._exchange.changes != seen, min(timeout_s, 3600.0))
            self._seen[ident] = self._exchange.changes

    def make_wakeable(self) -> None:
        """Do nothing: it always is."""

    def wake(self) -> None:
        with self._exchange:
            self._exchange.changed()

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def memory_fabrics(size: int, capacity_bytes: int = 1 << 20) -> List[MemoryFabric]:
    """Make a job of ``size`` ranks within this process; each link holds ``capacity_bytes`` in flight."""
    exchange, ranks = _Exchange(), range(size)
    pipes = [[_Pipe(capacity_bytes) for _ in ranks] for _ in ranks]
    made = []
    for rank in ranks:
        ends = {peer: (pipes[rank][peer], pipes[peer][rank]) for peer in ranks if peer != rank}
        links = {peer: MemoryLink(peer, *pair, exchange) for peer, pair in ends.items()}
        made.append(MemoryFabric(rank, size, links, exchange))
    return made


def memory_channels(size: int, capacity_bytes: int = 1 << 20) -> List[Channels]:
    """Make the channels of ``size`` ranks within this process."""
    channels = [memory_fabrics(size, capacity_bytes) for _ in Channels._fields]
    return [Channels(*fabrics) for fabrics in zip(*channels)]
