"""Ranks of a group in this process, for the tests of its point-to-point engine."""

from __future__ import annotations

import pytest

from ringcomm.errors import NotInitializedError
from ringcomm.group.failures import Reporter
from ringcomm.group.message_channel import SHORT_BYTES
from ringcomm.group.point_to_point import PointToPoint
from ringcomm.transport.memory import memory_fabrics
from tests.integration.group.works import Task
from tests.support.service import eventually

OVER = NotInitializedError("the group has ended")
TAG = (0, 5)
LONG = bytes(range(256)) * (SHORT_BYTES // 64)


class Rank:
    """A rank of a group whose links are pipes."""

    def __init__(self, fabric, spin_s=0.0):
        self.fabric, self.reporter = fabric, Reporter()
        self.engine = PointToPoint(fabric, self.reporter, spin_s, f"messages-{fabric.rank}")

    def send(self, peer, content, tag=5, limit_s=None):
        work = Task(f"send to rank {peer}")
        self.engine.send(peer, (0, tag), memoryview(content), work, limit_s)
        return work

    def receive(self, peer, nbytes, tag=5, limit_s=None):
        """The work, which has the memory as ``into``."""
        work = Task(f"recv from rank {peer}")
        work.into = bytearray(nbytes)
        self.engine.receive(peer, (0, tag), memoryview(work.into), work, limit_s)
        return work

    def leave(self):
        """Close the links, as a process that ends does."""
        self.engine.close(OVER)
        self.fabric.close()

    def has_lost(self, peer):
        return eventually(lambda: peer in self.engine._gone)


@pytest.fixture
def ranks():
    made = []

    def make(size, capacity=1 << 20, **options):
        made.extend(Rank(fabric, **options) for fabric in memory_fabrics(size, capacity))
        return made

    yield make
    for rank in made:
        rank.engine.close(OVER)
        assert rank.engine._thread is None or not rank.engine._thread.is_alive()
