"""`Wire`: one rank under test, and the test itself at the other end of each of its links."""

from __future__ import annotations

import pytest

from ringcomm.schedule.steps import exchange_lengths
from ringcomm.transport.memory import memory_fabrics


class Wire:
    """The fabric of rank 0, and the test's side as the other ranks. `call` is the header, without lengths,
    and the schedule of rank 0's present call.
    """

    def __init__(self, size=2, capacity_bytes=1 << 20):
        self.call = None
        self.fabric, *self.others = memory_fabrics(size, capacity_bytes)

    def put(self, data, peer=1):
        """Peer sends these bytes to rank 0."""
        assert self.others[peer - 1].link(0).send([memoryview(data)]) == len(data)

    def take(self, peer=1):
        """All bytes that rank 0 has sent to this peer so far."""
        buffer = bytearray(1 << 16)
        return bytes(buffer[: self.others[peer - 1].link(0).recv([memoryview(buffer)])])

    def going(self, peer=1):
        """The header that rank 0 sends to this peer."""
        header, schedule = self.call
        sends, expects = exchange_lengths(schedule)[peer]
        return header._replace(sends=sends, expects=expects).pack()

    def coming(self, peer=1):
        """The header that this peer sends if it is in the same call."""
        header, schedule = self.call
        sends, expects = exchange_lengths(schedule)[peer]
        return header._replace(sends=expects, expects=sends).pack()


@pytest.fixture
def wire():
    """Rank 0 of two."""
    return Wire()


@pytest.fixture
def make_wire():
    """Rank 0 of as many as needed: `make_wire(size, capacity_bytes)`."""
    return Wire
