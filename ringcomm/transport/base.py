"""The interface between the executor of schedules and the transports that carry the bytes.

A :class:`Link` is an ordered, reliable byte stream to one peer and back. A :class:`Fabric` is all
links of one rank. Both are used by one thread at a time, and nothing here blocks except
:meth:`Fabric.wait`. A new transport implements these two classes and passes
``tests/support/transport_contract.py``; it does not depend on collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, List, NamedTuple, Optional, Sequence

import numpy as np

from ..errors import RingcommError, fresh_copy
from ..wire.auth import Session

Views = Sequence[memoryview]
LARGE_BYTES = 4 * 1024 * 1024
"""Shorter buffers may hold no whole huge page; see :meth:`Fabric.prepare`."""


class LinkClosed(RingcommError):
    """The stream to a peer ended or broke. The executor turns this into an error for users.

    Attributes:
        peer: the rank at the other end.
        reason: the system's error message, such as ``connection reset by peer``.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the link to rank {peer} closed: {reason}")
        self.peer = peer
        self.reason = reason


class Link(ABC):
    """A byte stream to one peer, in both directions.

    Attributes:
        peer: the rank at the other end.
        session: authenticates control messages, if the link carries such and leaves the process.
        segment_bytes: how much is best received at once before it is reduced: little enough to
            stay in the processor's cache, and enough to be worth a call.
        burst_bytes: the most that is best handed over at once, before looking for received bytes.
            More in flight leaves the cache; measured over TCP, 64 MB take a quarter less time than
            without a limit.
        peeks: whether bytes that have arrived can be used where they lie, by :meth:`peek`.
    """

    peer: int
    session: Optional[Session] = None
    segment_bytes = 256 * 1024
    burst_bytes = 1024 * 1024
    peeks = False

    @property
    @abstractmethod
    def carrier(self) -> str:
        """Return the name of the carrier, as text for users."""

    @abstractmethod
    def send(self, views: Views) -> int:
        """Hand over as many bytes as fit right now, the views one after another.

        The bytes may be overwritten by the caller as soon as they are counted. Until then they stay
        where they are: the next call must start with the very first byte that was not counted.

        Returns:
            how many bytes were taken; 0 if none can be taken now.

        Raises:
            LinkClosed: the peer will never read them.
        """

    @abstractmethod
    def recv(self, views: Views) -> int:
        """Fill the views with bytes that have arrived, one view after another.

        Returns:
            how many bytes were written; 0 if none are there now.

        Raises:
            LinkClosed: the stream ended or broke, and everything that arrived before was handed out.
        """

    def send_packet(self, packet: memoryview) -> int:
        """As :meth:`send`, for one view of plain bytes that is not empty; quicker where most are short."""
        return self.send((packet,))

    def recv_packet(self, packet: memoryview) -> int:
        """As :meth:`recv`, for one view of plain bytes that is not empty; quicker where most are short."""
        return self.recv((packet,))

    def peek(self, most_bytes: int, item_bytes: int) -> Optional[memoryview]:
        """Return received bytes in place, for links whose ``peeks`` is set; :meth:`skip` takes them.

        They are only to be read, and before the next call of :meth:`skip`, :meth:`recv` or :meth:`close`.

        Args:
            most_bytes: the most to return; whole items.
            item_bytes: the length of an item. Bytes need not be aligned to it.

        Returns:
            whole items, the next ones of the stream; empty if none is there now. None if they can only be had
            by :meth:`recv`: an item lies in two places, they lie somewhere else, or the stream has ended.
        """
        del most_bytes, item_bytes
        return None

    def skip(self, count: int) -> bool:
        """Take bytes that :meth:`peek` has shown: the sender may overwrite them. Return whether they may be
        counted: not if the sender has aborted its call, and so may have overwritten them before.
        """
        raise NotImplementedError(f"nothing can be peeked at through {self.carrier} ({count} bytes)")

    def revoke(self) -> None:  # noqa: B027 - most links have nothing to revoke
        """Make sure that no byte that was handed to :meth:`send` and not counted ever arrives: its call is
        aborted. Nothing can be sent afterwards. Links that copy the bytes that they count need not do
        anything.
        """

    @abstractmethod
    def close(self) -> None:
        """End the stream in both directions. Bytes already taken are still delivered, and no others."""


class Stopped(Exception):
    """A wait has ended because this rank leaves the job."""


class Watch(ABC):
    """Interrupts waits: the control channel, over which the abort of the job is sent.

    Attributes:
        interval_s: how often :meth:`check` must be called during a wait, in seconds.
    """

    interval_s = 3600.0

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when :meth:`check` must be called; -1: none."""

    @abstractmethod
    def check(self) -> None:
        """Return if the job continues.

        Raises:
            RingcommError: the job is over; the same error on every rank.
        """


class StoppableWatch(Watch):
    """Interrupts waits when this rank leaves, besides what interrupts all waits.

    Attributes:
        stopping: whether this rank leaves the job.
        interrupted: the error of a rank whose program was interrupted in a wait; ends the engine's work.
    """

    def __init__(self, inner: Optional[Watch]) -> None:
        self.stopping = False
        self.interrupted: Optional[RingcommError] = None
        self.pulse: Optional[Callable[[], None]] = None
        self._inner = inner

    def fileno(self) -> int:
        return self._inner.fileno() if self._inner is not None else -1

    def check_here(self) -> None:
        """Raise if something in this process ends the engine's work."""
        if self.stopping:
            raise Stopped
        if self.interrupted is not None:
            raise fresh_copy(self.interrupted)

    def check(self) -> None:
        self.check_here()
        if self._inner is not None:
            self._inner.check()
        if self.pulse is not None:
            self.pulse()


class Fabric(ABC):
    """All links of one rank.

    Attributes:
        rank: this rank.
        size: number of ranks.
        watch: interrupts waits, or None.
    """

    rank: int
    size: int
    watch: Optional[Watch] = None

    @abstractmethod
    def link(self, peer: int) -> Link:
        """Return the link to a peer."""

    def rank_of(self, peer: int) -> int:
        """Return the rank in the job of this fabric's ``peer``."""
        return peer

    def prepare(self, address: int, nbytes: int) -> None:
        """Called when a buffer of :data:`LARGE_BYTES` or more is about to be sent from and received into."""
        del address, nbytes

    @abstractmethod
    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        """Sleep until a link may make progress, the watch's descriptor is readable, or the time is over. May
        return early for no reason. The caller checks the watch.
        """

    @abstractmethod
    def make_wakeable(self) -> None:
        """Prepare for :meth:`wake`; called once, before the first wait that it is to interrupt."""

    @abstractmethod
    def wake(self) -> None:
        """Make a :meth:`wait` that is going on, or else the next one, return at once. For any thread."""

    def revoke(self) -> None:
        """Revoke uncounted bytes on every link; see :meth:`Link.revoke`."""
        for peer in range(self.size):
            if peer != self.rank:
                self.link(peer).revoke()

    @abstractmethod
    def close(self) -> None:
        """Close every link."""


class Channels(NamedTuple):
    """The three channels of one rank, so that none of the three kinds of traffic waits for another.

    Attributes:
        direct: collectives that all ranks call in the same order, in the caller's thread.
        background: collectives that the engine matches by name, in its own thread.
        control: between engines: requests to rank 0, its responses, and heartbeats among
            all ranks.
    """

    direct: Fabric
    background: Fabric
    control: Fabric

    def close(self) -> None:
        """Close every link."""
        for fabric in self:
            fabric.close()


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

    def revoke(self) -> None:
        self.link.revoke()

    def close(self) -> None:
        self.link.close()


class Subset(Fabric):
    """The links among some ranks, without owning them. The n-th of ``ranks`` (ascending) has the number n.

    LinkClosed names the peer by its number in the whole fabric.
    """

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


def flat(view: memoryview) -> memoryview:
    """Return the view as plain bytes."""
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def address_of(view: memoryview) -> int:
    """Return where a contiguous view's bytes lie in this process."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def clipped(views: Views, most: int) -> List[memoryview]:
    """Return the first ``most`` bytes of the views."""
    found: List[memoryview] = []
    for view in views:
        if view.nbytes >= most:
            found.append(view[:most])
            break
        found.append(view)
        most -= view.nbytes
    return found


def after(views: Views, count: int) -> List[memoryview]:
    """Return the rest of the views after ``count`` bytes."""
    remaining = []
    for view in views:
        skipped = min(count, view.nbytes)
        count -= skipped
        if skipped < view.nbytes:
            remaining.append(view[skipped:])
    return remaining
