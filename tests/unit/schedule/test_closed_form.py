"""The closed forms beside replays of the schedules, and beside what was published."""

from __future__ import annotations

import pytest

from ringcomm.schedule import hierarchy
from ringcomm.schedule.closed_form import allreduce_s, best_allreduce
from ringcomm.schedule.cost import CostModel, predict
from ringcomm.schedule.machine import Machine
from ringcomm.schedule.registry import Problem, build
from ringcomm.schedule.steps import even_bounds

QUICK, SLOW = 8.4e-9, 84e-9  # seconds per byte at 1 Gbit/s and 100 Mbit/s
GIGABIT = Machine((QUICK,), wire_latency_s=60e-6)


def replayed(kind, ranks, nbytes, machine):
    size, count = sum(ranks), nbytes // 4
    host_of = tuple(host for host, places in enumerate(ranks) for _ in range(places))
    problems = [
        Problem(rank, size, count, even_bounds(count, size), hierarchy.hosts_of(host_of))
        for rank in range(size)
    ]
    model = CostModel(
        machine.local_latency_s, machine.local_byte_s, machine.reduce_byte_s, machine.message_s,
        machine.segment_bytes, host_of, machine.wire_latency_s, machine.wires(len(ranks)),
    )  # fmt: skip
    return predict([build("allreduce", kind, problem) for problem in problems], 4, model)


@pytest.mark.parametrize("kind", ["ring", "direct"])
@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [4_000_000, 64_000_000])
def test_closed_forms_agree_with_replays_of_the_schedules(kind, hosts, nbytes):
    ranks = [1] * hosts
    closed_s = allreduce_s(kind, nbytes, GIGABIT, ranks)
    assert closed_s == pytest.approx(replayed(kind, ranks, nbytes, GIGABIT), rel=0.12)


@pytest.mark.parametrize("ranks", [(2, 2), (2, 2, 2, 2), (4, 4), (3, 3, 3)])
def test_the_hierarchy_agrees_with_a_replay(ranks):
    closed_s = allreduce_s("hierarchical", 64_000_000, GIGABIT, ranks)
    assert closed_s == pytest.approx(replayed("hierarchical", ranks, 64_000_000, GIGABIT), rel=0.15)


def test_a_ring_over_unequal_links_is_as_slow_as_the_slowest():
    machine = Machine((QUICK, SLOW, QUICK))
    closed_s = allreduce_s("ring", 8_000_000, machine, (1, 1, 1))
    assert closed_s == pytest.approx(replayed("ring", (1, 1, 1), 8_000_000, machine), rel=0.12)


def test_slow_links_get_small_shares():
    machine = Machine((SLOW, QUICK, QUICK, QUICK))  # the slow host: its own part out, the sums in
    assert allreduce_s("direct", 8_000_000, machine, (1,) * 4) == pytest.approx(8_000_000 * SLOW, rel=0.02)
    assert allreduce_s("hierarchical", 8_000_000, machine, (2,) * 4) == pytest.approx(
        8_000_000 * SLOW, rel=0.03
    )


def efficiency(compute_s, nbytes, hosts):
    machine = Machine((8 / 25e9,), 50e-6)
    return compute_s / (compute_s + allreduce_s("ring", nbytes, machine, (1,) * hosts))


def test_published_points():
    """ResNet-50 on 8 hosts, and Inception V3 on 32, with 25 Gbit/s: 86 to 88 % and 88 % were published."""
    assert efficiency(256 / 703, 4 * 25_557_032, 8) == pytest.approx(0.86, abs=0.02)
    assert efficiency(64 / 142, 4 * 23_834_568, 32) == pytest.approx(0.88, abs=0.02)


def test_ranks_of_one_host_use_no_wire():
    for kind in ("direct", "hierarchical"):
        seconds = allreduce_s(kind, 100_000_000, GIGABIT, (4,))
        assert seconds == pytest.approx(1.5 * 100e6 * GIGABIT.local_byte_s, rel=0.1)
    assert allreduce_s("ring", 100, GIGABIT, (1,)) == 0.0


@pytest.mark.parametrize(
    ("ranks", "nbytes", "float32", "int8"),
    [((1,) * 4, 1e8, "ring", "direct"), ((1,) * 4, 1e5, "direct", "direct"),
     ((1,) * 32, 1e5, "ring", "direct"), ((4, 4), 1e8, "hierarchical", "hierarchical"),
     ((4, 1), 1e8, "ring", "direct"), ((4,), 1e5, "direct", "direct")],
)  # fmt: skip
def test_the_best_algorithm(ranks, nbytes, float32, int8):
    """That of the runtime: with int8 no ring, and equal numbers of ranks add up within hosts first."""
    assert best_allreduce(nbytes, GIGABIT, ranks)[0] == float32
    coded = best_allreduce(nbytes, GIGABIT, ranks, "int8")
    assert coded == (int8, allreduce_s(int8, nbytes * 260 / 1024, GIGABIT, ranks))
