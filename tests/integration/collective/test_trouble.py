"""Ranks that fail, leave or fall silent: all ranks learn which and why, and none hangs."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from ringcomm.config import Settings
from ringcomm.errors import LinkLostError, PeerLostError, PeerStalledError
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, errors_of, run_ranks
from ringcomm.testing.faulty import Cut, Faults, FaultyFabric
from tests.integration.collective.contributions import ONES, ROWS
from tests.support.errors import all_alike

SIZE = 3

COLLECTIVES = {
    "allreduce": lambda c: c.allreduce(ONES),
    "reducescatter": lambda c: c.reducescatter(ONES),
    "allgather": lambda c: c.allgather(ONES),
    "broadcast": lambda c: c.broadcast(ONES, 1),
    "alltoall": lambda c: c.alltoall(ROWS),
    "barrier": lambda c: c.barrier(),
    "broadcast_object": lambda c: c.broadcast_object("x", 1),
    "allgather_object": lambda c: c.allgather_object("x"),
}


def survivors(failure, culprit):
    """The errors of all ranks but the culprit."""
    return [error for rank, error in enumerate(failure.errors) if rank != culprit]


@pytest.mark.parametrize("name", ["allreduce", "allgather_object"])
class TestCulprits:
    def test_a_rank_that_raises_is_named_with_its_error(self, name):
        def work(context):
            context.barrier()
            if context.rank == 1:
                raise KeyError("learning_rate.")
            COLLECTIVES[name](context)
            context.barrier()

        with pytest.raises(RankFailed) as caught:
            run_ranks(SIZE, work, transport="tcp")
        assert isinstance(caught.value.errors[1], KeyError)
        errors = survivors(caught.value, 1)
        texts = ("rank 1 (localhost) was lost", "KeyError: 'learning_rate.'")
        all_alike(errors, PeerLostError, *texts, rank=1, host="localhost")

    def test_a_rank_that_leaves_early_is_named(self, name):
        def work(context):
            context.barrier()
            if context.rank != 1:
                COLLECTIVES[name](context)
                context.barrier()

        with pytest.raises(RankFailed) as caught:
            run_ranks(SIZE, work, transport="tcp")
        errors = survivors(caught.value, 1)
        finished = "rank 1 (localhost) has finished (it called shutdown())"
        all_alike(errors, PeerLostError, finished, "Every rank must make the same calls", rank=1)


@pytest.mark.parametrize("name", ["allgather", "barrier"])
def test_a_silent_rank_is_named_and_told(name):
    over = threading.Event()

    def work(context):
        context.barrier()
        if context.rank == 1:
            over.wait(30)
        try:
            COLLECTIVES[name](context)
            context.barrier()
        finally:
            over.set()

    settings = Settings(spin_us=0.0, timeout_s=0.5, start_timeout_s=30.0)
    errors = errors_of(SIZE, work, transport="tcp", settings=settings)
    silent = "rank 1 (localhost) is silent while others were in"
    all_alike(errors, PeerStalledError, silent, "not a byte for 0.5 s", rank=1)


class TestLate:
    """A rank that lives, but whose program does not come to a direct call."""

    def test_it_is_asked_where_it_is_and_given_up(self, caplog):
        over = threading.Event()

        def work(context):
            context.barrier()
            if context.rank == 1:
                over.wait(30)
            try:
                context.allreduce(ONES)
                context.barrier()
            finally:
                over.set()

        limits = Settings(spin_us=0.0, late_after_s=1.5, dead_after_s=0.0)
        errors = errors_of(SIZE, work, transport="tcp", settings=limits)
        late = "rank 1 (localhost) is late while others were in allreduce(shape (8,),"
        texts = (late, "has waited for", "RINGCOMM_LATE_AFTER", "run_ranks")  # where the main thread is
        all_alike(errors, PeerStalledError, *texts, rank=1, host="localhost")
        texts = [record.getMessage() for record in caplog.records]
        assert any(
            "allreduce(shape (8,), float32, op=Average), call number 2, has waited for" in text
            and "on ranks 0 (localhost) and 2 (localhost) for rank 1 (localhost)" in text
            for text in texts
        )
        assert any(text.startswith("Rank 1 (localhost), for which others wait, is here:") for text in texts)


@pytest.mark.parametrize("pair, busy", [((0, 1), True), ((1, 2), False)])
def test_a_link_that_is_reset_is_named_and_neither_of_its_ranks(pair, busy):
    """No rank waits: still it is noticed, and all ranks raise the same at the next call."""
    cut = threading.Barrier(SIZE)

    def work(context):
        context.barrier()
        cut.wait(10)
        if context.rank == pair[0]:
            sock = context.group.channels.control.link(pair[1]).sock
            sock.shutdown(2)
            if not busy:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        began_s = time.monotonic()
        while busy and time.monotonic() < began_s + 30 and context.engine._thread._state.broken is None:
            sum(range(1000))  # the program computes, and asks for nothing
        for _ in range(1000):
            context.barrier()
            time.sleep(0.01)

    errors = errors_of(SIZE, work, transport="tcp", settings=Settings(spin_us=0.0))
    running = f"rank {pair[0]} (localhost) and rank {pair[1]} (localhost) are running"
    all_alike(errors, LinkLostError, running, ranks=pair, rank=None)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("after_bytes", [0, 40])
def test_a_transfer_that_stands_still_is_noticed(size, after_bytes):
    """Heartbeats arrive, as they may where only large packets get lost; the data do not."""
    faults = Faults(would_block=0.0, short=0.0, cuts=(Cut(0, 1, True, after_bytes, silent=True),))
    wrapped = []

    def wrap(fabric):
        wrapped.append(fabric)  # of each rank: direct, background, control
        return FaultyFabric(fabric, faults) if len(wrapped) % 3 == 1 else fabric

    def work(context):
        for _ in range(20):
            context.allreduce(ONES, Sum)

    limits = Settings(spin_us=0.0, dead_after_s=0.4, measure=False)
    errors = errors_of(size, work, transport="memory", settings=limits, wrap=wrap)
    stuck = [error for error in errors if "the transfer stands still" in str(error)]
    assert stuck
    assert all(type(error) is PeerStalledError and error.rank in (0, 1) for error in stuck)
    assert "although" in str(stuck[0]) and "bytes into allreduce" in str(stuck[0])
