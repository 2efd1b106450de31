"""Arrays in memory that the ranks of a host share: results, where that is impossible, and their end."""

import gc
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.testing.cluster import run_ranks
from ringcomm.transport import arena
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.local import make_links

pytestmark = pytest.mark.skipif(arena.own() is None, reason="this system has no such memory")


@pytest.fixture
def pair(monkeypatch):
    """The links at both ends of a Unix socket, with an arena that no earlier test has mapped."""
    monkeypatch.setattr(arena, "_own", arena.Arena())
    ends = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(make_links, {1 - rank: ends[rank]}, "auto") for rank in range(2)]
    links = [task.result()[1 - rank] for rank, task in enumerate(tasks)]
    yield links
    for link in links:
        link.close()


def shared(array):
    found = rc.empty(array.shape, array.dtype)
    assert found in arena.own()
    found[...] = array
    return found


def sums(context):
    """The same reductions with ordinary arrays, with shared ones, and with one of each kind."""
    found = []
    cases = [(np.float32, rc.Sum), (np.float64, rc.Average), (np.float16, rc.Sum), (np.int64, rc.Max)]
    for dtype, op in cases:
        random = np.random.default_rng(context.rank)
        mine = (random.standard_normal(800_001) * 100).astype(dtype)
        for turn in range(3):
            own = turn == 1 or (turn == 2 and context.rank == 0)
            data = shared(mine) if own else mine.copy()
            context.allreduce_(data, op)
            found.append(data.tobytes())
    return found


@pytest.mark.parametrize(
    ("size", "transport", "algorithm"),
    [(2, "auto", "direct"), (2, "shm", "direct"), (3, "shm", "ring")],
)
def test_the_same_bits_as_with_ordinary_arrays(size, transport, algorithm):
    settings = rc.Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0, algorithm=algorithm)
    found = run_ranks(size, sums, transport=transport, settings=settings)
    for turns in zip(*(iter(found[0]),) * 3):
        assert len(set(turns)) == 1
    assert all(each == found[0] for each in found)


class TestArray:
    def test_its_pages_go_back_with_the_last_view(self):
        owner = arena.own()

        def used():
            return os.fstat(owner.descriptor).st_blocks * 512

        gc.collect()
        before = used()
        array = rc.empty(20_000_000, "u1")
        view = array[1000:].view()
        array[:] = 7
        assert used() - before >= 20_000_000
        del array
        assert view[5] == 7 and view in owner
        del view
        gc.collect()
        assert used() == before
        size = os.fstat(owner.descriptor).st_size
        again = rc.empty(20_000_001, "u1")
        assert not again.any()
        assert os.fstat(owner.descriptor).st_size == size  # the same place in the file

    def test_a_forked_process_gives_nothing_back(self):
        arrays = [shared(np.full(1_000_000, 3.0, np.float32))]
        child = os.fork()
        if not child:
            code = 1
            try:
                arrays.clear()
                gc.collect()
                fresh = rc.empty(1_000_000)
                fresh[:] = 9
                code = 0 if fresh in arena.own() else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert (arrays[0] == 3.0).all()


class TestLink:
    def test_what_was_revoked_is_not_counted(self, pair):
        one, other = pair
        data = shared(np.ones(1_000_000, np.uint8))
        assert one.send([data.data]) == 0
        assert other.peek(1_000_000, 4).nbytes == 1_000_000
        one.revoke()
        assert not other.skip(1_000_000)
        assert other.peek(1_000_000, 4) is None
        assert other.recv([memoryview(bytearray(10))]) == 0
        with pytest.raises(LinkClosed, match="given up a call"):
            one.send([data.data])
        one.close()
        with pytest.raises(LinkClosed, match="closed the connection"):
            other.recv([memoryview(bytearray(10))])
