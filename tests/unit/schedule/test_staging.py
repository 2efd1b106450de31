"""Copies between devices and the host: complete, in time, and priced."""

from __future__ import annotations

import pytest

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule.cost import CopyCost, CostModel, predict
from ringcomm.schedule.staging import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    Copies,
    Copy,
    piece_bytes,
    plan_copies,
    with_devices,
)
from ringcomm.schedule.steps import SOURCE, Recv, Send, even_bounds
from tests.support.prover.staging_check import (
    check_staged_all_gather,
    check_staged_all_reduce,
    check_staged_broadcast,
    check_staged_reduce_scatter,
)
from tests.unit.schedule.building import make, names

NO_COPIES = Copies((), ())
COUNTS = (0, 1, 5, 64, 97)


def schedules(collective, name, size, count, **options):
    return [make(collective, name, rank, size, count, **options) for rank in range(size)]


def whole(made, count):
    return [plan_copies(schedule, [(0, count)]) for schedule in made]


@pytest.mark.parametrize("size", range(2, 13))
@pytest.mark.parametrize("name", names("allreduce"))
def test_every_all_reduce(name, size):
    for count in COUNTS:
        made = schedules("allreduce", name, size, count)
        check_staged_all_reduce(made, count, whole(made, count))


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 1, 2), (3, 4, 5)), ((0, 2), (1, 3), (4, 5))])
def test_hierarchical(hosts):
    size = sum(map(len, hosts))
    for count in COUNTS:
        made = schedules("allreduce", "hierarchical", size, count, hosts=hosts)
        check_staged_all_reduce(made, count, whole(made, count))


@pytest.mark.parametrize("size", range(2, 10))
def test_every_collective_by_rows_and_broadcast(size):
    for count in COUNTS:
        bounds = even_bounds(count, size)
        for name in names("reducescatter"):
            made = schedules("reducescatter", name, size, count)
            copies = [plan_copies(steps, [bounds[rank : rank + 2]]) for rank, steps in enumerate(made)]
            check_staged_reduce_scatter(made, bounds, copies)
        for name in names("allgather"):
            made = schedules("allgather", name, size, count)
            check_staged_all_gather(made, bounds, whole(made, count))
        for name in names("broadcast"):
            for root in (0, size - 1):
                made = schedules("broadcast", name, size, count, root=root)
                check_staged_broadcast(made, root, count, whole(made, count))


@pytest.mark.parametrize("name", names("allreduce"))
@pytest.mark.parametrize("field", ["loads", "stores"])
def test_any_copy_that_is_missing_is_found(name, field):
    size, count = 4, 24
    made = schedules("allreduce", name, size, count)
    copies = whole(made, count)
    for rank in range(size):
        planned = getattr(copies[rank], field)
        assert planned
        for place in range(len(planned)):
            less = copies[rank]._replace(**{field: planned[:place] + planned[place + 1 :]})
            with pytest.raises(BrokenInvariantError, match="schedule is wrong"):
                check_staged_all_reduce(made, count, [*copies[:rank], less, *copies[rank + 1 :]])


def test_a_broadcast_loads_at_the_root_and_stores_elsewhere():
    made = schedules("broadcast", names("broadcast")[0], 3, 10, root=1)
    copies = whole(made, 10)
    assert [bool(item.loads) for item in copies] == [False, True, False]
    assert [bool(item.stores) for item in copies] == [True, False, True]


def test_a_gather_loads_its_own_rows_and_stores_the_others():
    bounds = even_bounds(12, 3)
    made = schedules("allgather", "direct", 3, 12)
    loads, stores = plan_copies(made[1], [(0, 12)])
    assert loads == (Copy(4, 8),)
    assert stores == (Copy(0, 4), Copy(8, 12))
    assert bounds == (0, 4, 8, 12)


def test_sources_are_loaded_from_the_array_that_is_only_read():
    steps = [Send(1, 0, 3, SOURCE), Recv((1,), 2, 6)]
    assert plan_copies(steps, [(0, 6)]) == Copies((Copy(0, 3, SOURCE),), (Copy(2, 6),))


def test_chunks_that_different_steps_finish_are_stored_separately():
    """In one store the chunk that is finished first would wait for the other."""
    for rank in range(2):
        _, stores = plan_copies(make("allreduce", "direct", rank, 2, 10), [(0, 10)])
        own = (0, 5) if rank == 0 else (5, 10)
        assert [copy[:2] for copy in stores] == [own, (5, 10) if rank == 0 else (0, 5)]


def test_loads_come_in_the_order_of_need():
    steps = [Send(1, 6, 9), Send(2, 0, 3), Recv((1, 2), 3, 6, (-1, 1, 2), True)]
    assert [copy[:2] for copy in plan_copies(steps, [(3, 6)]).loads] == [(6, 9), (0, 3), (3, 6)]


def seconds(size, copy_rate, copies=None, name="direct", count=1 << 24):
    made = schedules("allreduce", name, size, count)
    model = CostModel(latency_s=50e-6, byte_s=1e-9, reduce_byte_s=0.0)
    if not copy_rate:
        return predict(made, 4, model)
    cost = CopyCost(size, 1 / copy_rate, 1 / copy_rate, 30e-6)
    return predict(with_devices(made, whole(made, count)), 4, model, copying=cost)


@pytest.mark.parametrize("name", ["direct", "ring"])
@pytest.mark.parametrize("size", [2, 4])
def test_fast_copies_overlap_and_slow_ones_decide(name, size):
    """Against a network of 1 GB/s: the formula max(copy out, network, copy in), and where it ends."""
    alone = seconds(size, 0, name=name)
    assert seconds(size, 11.5e9, name=name) == pytest.approx(alone, rel=0.01)
    assert seconds(size, 3e9, name=name) < 1.1 * alone
    slow = (4 << 24) / 0.2e9
    assert slow < seconds(size, 0.2e9, name=name) < 2 * slow + alone


def test_without_a_device_nothing_is_added():
    made = schedules("allreduce", "ring", 3, 99)
    extended = with_devices(made, [NO_COPIES] * 3)
    assert extended[:3] == [list(steps) for steps in made] and extended[3:] == [[], [], []]


def test_pieces():
    assert piece_bytes(1000, 1e-10, 30e-6) == MIN_PIECE_BYTES
    assert piece_bytes(1 << 40, 1e-10, 30e-6) == MAX_PIECE_BYTES
    fast, slow = piece_bytes(64 << 20, 1 / 50e9, 30e-6), piece_bytes(64 << 20, 1 / 3e9, 30e-6)
    assert slow < fast
