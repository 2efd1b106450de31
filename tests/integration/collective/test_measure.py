"""Measuring together: every rank ends with the same model, and collectives chosen by it are right."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.measure import measure
from ringcomm.config import Settings
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.support.reference import assert_reduced, contributions, same_bits

FLOAT32 = np.dtype(np.float32)


def measured(context):
    hosts = [peer.host_index for peer in context.peers]
    return measure(context._runner.with_settings(context.settings), hosts)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 1), (5, 2), (6, 2), (9, 1), (4, 4)])
def test_all_ranks_have_the_same_model(size, ranks_per_host):
    first, *others = run_ranks(size, measured, ranks_per_host=ranks_per_host)
    assert all(model == first for model in others)
    hosts = tuple(rank // ranks_per_host for rank in range(size))
    assert first.hosts == (hosts if hosts[-1] else ())
    assert len(first.wire_byte_s) == (hosts[-1] + 1 if hosts[-1] else 0)
    for value in (first.latency_s, first.byte_s, first.reduce_byte_s, *first.wire_byte_s):
        assert 1e-12 < value < 0.1


@pytest.mark.parametrize(
    ("size", "ranks_per_host", "algorithm"),
    [(3, 1, ""), (6, 2, ""), (6, 3, "hierarchical"), (5, 2, "hierarchical")],
)
def test_collectives_after_that(size, ranks_per_host, algorithm):
    inputs = contributions(FLOAT32, size, 5000)

    def work(context):
        context._tune()
        own = inputs[context.rank]
        scattered = context.reducescatter(own, Sum)
        return [
            context.allreduce(own, Sum),
            context.allreduce(own[:3], Sum),
            context.allgather(scattered),
            context.broadcast(own, size - 1),
            context.allreduce(own.astype(np.float16), Sum),
        ]

    settings = Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=256, algorithm=algorithm)
    results = run_ranks(size, work, settings=settings, ranks_per_host=ranks_per_host)
    for column in zip(*results):
        assert same_bits(column)
    assert_reduced(results[0][0], inputs, Sum)
    assert_reduced(results[0][1], [array[:3] for array in inputs], Sum)
    assert_reduced(results[0][2], inputs, Sum)
    np.testing.assert_array_equal(results[0][3], inputs[-1])
