"""The headers of one call: which one goes to each peer, and which one must come from it."""

from __future__ import annotations

from typing import Dict, List, Sequence

from ..errors import MismatchError
from ..schedule.steps import Step, exchange_lengths
from ..wire.frames import HEADER_BYTES, Header, explain_difference, stamp, unpack_header


class Headers:
    """Packed headers, by peer. They differ in how many elements are exchanged with that peer.

    Peers with equal headers share the bytes, so most calls have a single one to stamp.

    Args:
        header: what all peers are told; the lengths are filled in here, the sequence number by :meth:`stamp`.
        schedule: this rank's steps, from which the lengths follow.
        rank: this rank, for errors.

    Attributes:
        outgoing: what goes in front of the bytes to each peer.
        expected: what comes from each peer if it is in the same call.
    """

    __slots__ = ("_packed", "_rank", "expected", "outgoing")

    def __init__(self, header: Header, schedule: Sequence[Step], rank: int) -> None:
        self._rank = rank
        self.outgoing: Dict[int, bytearray] = {}
        self.expected: Dict[int, bytearray] = {}
        shared: Dict[bytes, bytearray] = {}
        for peer, (sends, wants) in exchange_lengths(schedule).items():
            mine = header._replace(sends=sends, wants=wants)
            for headers, content in ((self.outgoing, mine.pack()), (self.expected, mine.turned().pack())):
                headers[peer] = shared.setdefault(content, bytearray(content))
        self._packed: List[bytearray] = list(shared.values())

    def stamp(self, sequence: int) -> None:
        """Write the call's number into all of them."""
        for packed in self._packed:
            stamp(packed, sequence)

    def check(self, peer: int, received: memoryview) -> None:
        """Compare what has come from a peer with what must come from it.

        Raises:
            MismatchError: the peer is in another call.
        """
        expected = self.expected[peer]
        if received[:HEADER_BYTES] != expected:
            mine, theirs = unpack_header(expected), unpack_header(received[:HEADER_BYTES])
            raise MismatchError(explain_difference(mine, theirs), rank=self._rank, peer=peer)
