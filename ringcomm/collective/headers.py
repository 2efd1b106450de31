"""The headers of one call: those sent to each peer, and those expected from it."""

from __future__ import annotations

from typing import Dict, List, Sequence

from ..errors import MismatchError
from ..schedule.steps import Step, exchange_lengths
from ..wire.frames import HEADER_BYTES, Header, stamp, unpack_header
from ..wire.signature import explain_difference


class Headers:
    """Packed headers, by peer. They differ in the number of elements exchanged with that peer.

    Peers with equal headers share the bytes, so most calls have a single one to stamp. The lengths of
    ``header`` are filled in here from the schedule, the number of a call by :meth:`stamp`.
    """

    __slots__ = ("_packed", "_rank", "expected", "outgoing")

    def __init__(self, header: Header, schedule: Sequence[Step], rank: int) -> None:
        self._rank = rank
        self.outgoing: Dict[int, bytearray] = {}
        self.expected: Dict[int, bytearray] = {}
        shared: Dict[bytes, bytearray] = {}
        for peer, (sends, expects) in exchange_lengths(schedule).items():
            mine = header._replace(sends=sends, expects=expects)
            for headers, content in ((self.outgoing, mine.pack()), (self.expected, mine.turned().pack())):
                headers[peer] = shared.setdefault(content, bytearray(content))
        self._packed: List[bytearray] = list(shared.values())

    def stamp(self, sequence: int) -> None:
        """Write the call's number into all of them."""
        for packed in self._packed:
            stamp(packed, sequence)

    def check(self, peer: int, received: memoryview) -> None:
        """Compare a peer's header with the expected one; MismatchError if the peer is in another call."""
        expected = self.expected[peer]
        if received[:HEADER_BYTES] != expected:
            mine, theirs = unpack_header(expected), unpack_header(received[:HEADER_BYTES])
            # An unexplained difference is a byte that must be zero.
            difference = explain_difference(mine, theirs) or "its header is damaged"
            raise MismatchError(difference, rank=self._rank, peer=peer)
