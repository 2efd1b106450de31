"""Ranks that do not make the same call: all ranks learn which calls there were, and none hangs."""

from __future__ import annotations

import contextlib
import re
import threading

import numpy as np
import pytest

from ringcomm.errors import MismatchError, PeerLostError
from ringcomm.ops import Max, Sum
from ringcomm.testing.cluster import RankFailed, errors_of, run_ranks
from tests.integration.collective.contributions import ONES, ROWS
from tests.support.errors import all_alike

SIZE = 3

# What rank 1 does, what the others do, and the two calls as the message must show them.
DISAGREEMENTS = {
    "op": (
        lambda c: c.allreduce(ONES, Sum), lambda c: c.allreduce(ONES, Max),
        "allreduce(shape (8,), float32, op=Sum)", "allreduce(shape (8,), float32, op=Max)",
    ),
    "type": (
        lambda c: c.allreduce(ONES), lambda c: c.allreduce(ONES.astype("f8")),
        "allreduce(shape (8,), float32, op=Average)", "allreduce(shape (8,), float64, op=Average)",
    ),
    "shape": (
        lambda c: c.allreduce(ONES), lambda c: c.allreduce(ONES.reshape(2, 4)),
        "allreduce(shape (8,), float32, op=Average)", "allreduce(shape (2, 4), float32, op=Average)",
    ),
    "length": (
        lambda c: c.allreduce(ONES[:0]), lambda c: c.allreduce(ONES),
        "allreduce(shape (0,), float32, op=Average)", "allreduce(shape (8,), float32, op=Average)",
    ),
    "root": (
        lambda c: c.broadcast(ONES, 1), lambda c: c.broadcast(ONES, 0),
        "broadcast(8 elements, float32, root_rank=1)", "broadcast(8 elements, float32, root_rank=0)",
    ),
    "collective": (
        lambda c: c.allreduce(ONES), lambda c: c.allgather(ONES),
        "allreduce(shape (8,), float32, op=Average)", "allgather(rows of shape (), float32)",
    ),
    "order": (
        lambda c: c.barrier(), lambda c: c.allreduce(ONES),
        "barrier()", "allreduce(shape (8,), float32, op=Average)",
    ),
    "objects": (
        lambda c: c.allgather_object(1), lambda c: c.allgather(np.zeros(4, np.uint8)),
        "allgather_object()", "allgather(rows of shape (), uint8)",
    ),
    "in place": (
        lambda c: c.allgather(np.ones((2, 3))), lambda c: c.allgather_(np.ones(3)),
        "allgather(rows of shape (3,), float64)", "allgather(rows of shape (3,), float64)",
    ),
    "name": (
        lambda c: c.alltoall(ROWS, name="a"), lambda c: c.alltoall(ROWS, name="b"),
        "alltoall(rows of shape (2,), float64, name='a')", "alltoall(rows of shape (2,), float64, name='b')",
    ),
    "scale": (
        lambda c: c.reducescatter(ROWS, Sum, prescale_factor=0.5),
        lambda c: c.reducescatter(ROWS, Sum, postscale_factor=0.5),
        "reducescatter(shape (6, 2), float64, op=Sum, prescale_factor=0.5)",
        "reducescatter(shape (6, 2), float64, op=Sum, postscale_factor=0.5)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(DISAGREEMENTS))
class TestDisagreement:
    def work(self, kind):
        one, others, *_ = DISAGREEMENTS[kind]

        def work(context):
            (one if context.rank == 1 else others)(context)
            context.barrier()  # the root of a short broadcast may have left it already

        return work

    def test_every_rank_reads_both_calls(self, kind):
        errors = errors_of(SIZE, self.work(kind), transport="tcp")
        all_alike(errors, MismatchError, *DISAGREEMENTS[kind][2:])
        text = str(errors[0])
        assert text.startswith("The ranks do not make the same call.\n")
        place = rf"at {re.escape(__file__)}:\d+"
        assert re.search(rf"ranks? [0-9, ]+: .* {place}; rank \d makes another call", text)
        assert len(text.splitlines()) <= 1 + SIZE

    def test_without_a_rendezvous_no_rank_hangs(self, kind):
        errors = errors_of(SIZE, self.work(kind), transport="memory")
        assert any(isinstance(error, MismatchError) for error in errors)
        assert all(isinstance(error, (MismatchError, PeerLostError)) for error in errors)


LONG = np.ones(1 << 20, np.float32)


BROADCASTS = {
    "root": (lambda c: c.broadcast(ONES, 0), lambda c: c.broadcast(ONES, c.size - 1)),
    "root of a long one": (lambda c: c.broadcast(LONG, 0), lambda c: c.broadcast(LONG, c.size - 1)),
    "length": (lambda c: c.broadcast(ONES, 0), lambda c: c.broadcast(LONG, 0)),
    "type": (lambda c: c.broadcast(ONES, 1), lambda c: c.broadcast(ONES.astype("i4"), 1)),
    "object": (lambda c: c.broadcast_object("x", 0), lambda c: c.broadcast_object("x", 1)),
    "another call": (lambda c: c.broadcast(ONES, 0), lambda c: c.allreduce(ONES)),
}


@pytest.mark.parametrize("kind", list(BROADCASTS))
@pytest.mark.parametrize(("size", "odd"), [(2, 0), (3, 2), (4, 1)])
class TestBroadcastsThatDisagree:
    """Its root waits for no rank, and the trees differ; still it is noticed in the call itself."""

    def call(self, kind, odd, context):
        usual, other = BROADCASTS[kind]
        (other if context.rank == odd else usual)(context)

    def test_a_rank_notices_without_a_further_call(self, kind, size, odd):
        noticed = threading.Event()

        def work(context):
            try:
                self.call(kind, odd, context)
            except MismatchError:
                noticed.set()
            assert noticed.wait(5.0)  # ranks that have left the call stay connected

        with contextlib.suppress(RankFailed):  # a rank may still wait when the others leave
            run_ranks(size, work, timeout_s=10.0)
        assert noticed.is_set()

    def test_all_ranks_raise_it(self, kind, size, odd):
        def work(context):
            context.barrier()
            self.call(kind, odd, context)
            context.barrier()

        all_alike(errors_of(size, work, transport="tcp"), MismatchError)
