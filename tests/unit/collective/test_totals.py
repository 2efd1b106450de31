"""Sums over the calls of a runner: exact counts and bytes, on the runs themselves and on dropped plans."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective import plans as plans_module
from ringcomm.collective.totals import OperationTotal, Tally, Totals
from ringcomm.ops import Collective, Sum
from ringcomm.testing.cluster import run_ranks
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Signature

COUNTS = [1, 100, 20_000, 300_000]
"""The first two use the executor for short messages."""


def sums(context):
    found = context._runner.totals()
    peers = {rank: (peer.sent_bytes, peer.received_bytes) for rank, peer in found.peers.items()}
    return peers, {name: (item.runs, item.moved_bytes) for name, item in found.kinds.items()}


def differences(after, before):
    return [new - old for new, old in zip(after, before)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", [0, "int8"])
def test_what_one_rank_sends_another_receives(count, codec):
    def work(context):
        before, _ = sums(context)
        data = np.ones(count, np.float32)
        for _ in range(3):
            context.allreduce(data, Sum, compression=codec) if codec else context.allreduce(data, Sum)
        after, kinds = sums(context)
        return {rank: differences(after[rank], before.get(rank, (0, 0))) for rank in after}, kinds

    results = run_ranks(3, work)
    moved = [peers for peers, _ in results]
    for rank, peers in enumerate(moved):
        for other, (sent, received) in peers.items():
            assert [received, sent] == moved[other][rank]
    for peers, kinds in results:
        assert kinds["allreduce"][0] == 3
        assert kinds["allreduce"][1] == sum(map(sum, peers.values())) > 0


@pytest.mark.parametrize("rows", [1, 1000])
def test_short_rows_are_one_call_like_long_ones(rows):
    def work(context):
        for _ in range(3):
            context.allgather(np.ones(rows))
        context.alltoall(np.ones(2 * rows))
        return sums(context)

    for peers, kinds in run_ranks(2, work):
        assert (kinds["allgather"][0], kinds["alltoall"][0]) == (3, 1)
        payload = 2 * 3 * 8 * rows + 2 * 8 * rows
        assert payload < sum(count for _, count in kinds.values()) <= sum(map(sum, peers.values()))


def test_plans_that_are_dropped_stay_in_the_sums(monkeypatch):
    monkeypatch.setattr(plans_module, "_PLANS_KEPT", 4)

    def work(context):
        for count in range(1, 21):
            context.allreduce(np.ones(count, np.float32), Sum)
        assert len(context._runner._plans) <= 4
        return sums(context)[1]["allreduce"]

    assert [runs for runs, _ in run_ranks(2, work)] == [20, 20]


def test_internal_calls_count_as_bytes_only():
    def work(context):
        context._tune()
        context.barrier()
        return set(sums(context)[1]), context._runner.last_call

    assert run_ranks(2, work) == [({"barrier"}, "barrier()")] * 2


def test_the_sums_stay_when_a_rank_has_left():
    def work(context):
        context.allreduce(np.ones(1000, np.float32), Sum)
        before = sums(context)
        context.close()
        return before == sums(context)

    assert run_ranks(2, work) == [True, True]


def test_calls_for_a_purpose_are_counted_under_its_label():
    call = Signature("", 0, Collective.ALLREDUCE, int(Sum), NO_ROOT, ("float32",), ((3,),), items=3)
    totals, tally, other = Totals(), Tally("allreduce 'conv'"), Tally("allreduce 'dense'")
    for each, took_s in ((tally, 1.0), (tally, 2.0), (other, 4.0)):
        each.add(call, took_s)
    totals.operations[call.describe()] = OperationTotal()
    totals.operations[call.describe()].add(4, 9.0, 400)
    tally.move(totals)
    left = totals.operations[call.describe()]
    assert (left.runs, left.took_s, left.moved_bytes) == (2, 6.0, 200)
    found = totals.operations["allreduce 'conv'"]
    assert (found.runs, found.took_s, found.moved_bytes) == (2, 3.0, 200)
    left.add(-1, 0.0, 0)  # now there is one run, which is the other purpose's
    other.move(totals)
    assert set(totals.operations) == {tally.label, other.label}
    tally.move(totals)  # nothing is left that it could take
    assert totals.operations[tally.label].runs == 2
