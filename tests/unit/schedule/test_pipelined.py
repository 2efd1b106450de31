"""The all-reduce in blocks: proved with and without devices, the bits of `direct`, and what it is for."""

from __future__ import annotations

import pytest

from ringcomm.schedule import direct, pipelined
from ringcomm.schedule.cost import CopyCost, CostModel, predict
from ringcomm.schedule.staging import plan_copies, with_devices
from ringcomm.schedule.steps import Recv, even_bounds
from tests.support.prover.staging_check import check_staged_all_reduce
from tests.support.prover.verify import check_all_reduce


def schedules(size, count, blocks, bounds=None):
    edges = even_bounds(count, size) if bounds is None else bounds
    return [pipelined.all_reduce(rank, size, edges, blocks) for rank in range(size)]


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", range(2, 9))
def test_every_element_is_summed_and_copied_in_time(size, blocks):
    for count in (0, 1, size, 5, 64, 97):
        made = schedules(size, count, blocks)
        check_all_reduce(made, count)
        check_staged_all_reduce(made, count, [plan_copies(steps, [(0, count)]) for steps in made])


def test_chunks_may_be_uneven_and_empty():
    made = schedules(3, 20, 4, (0, 0, 17, 20))
    check_all_reduce(made, 20)


def test_the_order_of_additions_is_that_of_direct():
    bounds = even_bounds(64, 4)
    cut, whole = pipelined.all_reduce(1, 4, bounds, 4), direct.all_reduce(1, 4, bounds)
    folds, expected = ({step.fold for step in steps if isinstance(step, Recv)} for steps in (cut, whole))
    assert folds == expected


def test_results_of_a_block_follow_the_contributions_of_the_next():
    kinds = ["fold" if step.fold else "result" for step in schedules(2, 80, 4)[0] if isinstance(step, Recv)]
    assert kinds == ["fold", "fold", "result", "fold", "result", "fold", "result", "result"]


def test_small_arrays_are_one_block_and_schedules_stay_short():
    assert pipelined.blocks_of(0, 2) == pipelined.blocks_of(1 << 18, 2) == 1
    for size in range(1, direct.MAX_RANKS + 1):
        assert pipelined.blocks_of(1 << 40, size) * size <= 256


@pytest.mark.parametrize("size", [2, 4])
def test_the_model_prefers_it_where_copies_are_as_slow_as_the_network(size):
    count = 1 << 24
    model = CostModel(latency_s=50e-6, byte_s=1e-9, reduce_byte_s=0.0)

    def seconds(made, copy_rate):
        copies = [plan_copies(steps, [(0, count)]) for steps in made]
        cost = CopyCost(size, 1 / copy_rate, 1 / copy_rate, 30e-6)
        return predict(with_devices(made, copies), 4, model, copying=cost)

    whole = [direct.all_reduce(rank, size, even_bounds(count, size)) for rank in range(size)]
    cut = schedules(size, count, pipelined.blocks_of(count, size))
    slowest_s = max(4e-9 * count, 8e-9 * count * (size - 1) / size)
    assert seconds(cut, 1e9) < 1.15 * slowest_s < seconds(whole, 1e9)
    assert seconds(cut, 11.5e9) == pytest.approx(seconds(whole, 11.5e9), rel=0.05)
