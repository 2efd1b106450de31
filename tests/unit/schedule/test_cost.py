"""The model against the algorithms' formulas, closed forms, calibrations, and shares of unequal links."""

from __future__ import annotations

import random
from math import log2

import pytest

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule import direct, hierarchy, ring, tree
from ringcomm.schedule.cost import (
    LOCAL_LATENCY_S,
    Calibration,
    CostModel,
    allreduce_s,
    best_allreduce,
    coarse,
    interface_shares,
    model_of,
    part_of,
    predict,
)
from ringcomm.schedule.registry import Problem, build
from ringcomm.schedule.steps import Recv, Send, even_bounds

ALPHA, BETA, GAMMA = 50e-6, 1e-9, 2e-10
MODEL = CostModel(latency_s=ALPHA, byte_s=BETA, reduce_byte_s=GAMMA)


def price(one, size, model=MODEL, item_bytes=4):
    return predict([one(r) for r in range(size)], item_bytes, model)


@pytest.mark.parametrize("p", [2, 4, 16])
@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (lambda r, p: ring.all_reduce(r, p, even_bounds(16000, p)),
         lambda p, n: 2 * (p - 1) * ALPHA + (p - 1) / p * n * (2 * BETA + GAMMA)),
        (lambda r, p: direct.all_reduce(r, p, even_bounds(16000, p)),
         lambda p, n: 2 * ALPHA + (p - 1) / p * n * (2 * BETA + GAMMA)),
        (lambda r, p: direct.one_shot(r, p, 16000), lambda p, n: ALPHA + (p - 1) * n * (BETA + GAMMA)),
        (lambda r, p: tree.all_reduce(r, p, 16000), lambda p, n: log2(p) * (ALPHA + n * (BETA + GAMMA))),
        (lambda r, p: tree.broadcast(r, p, 1, 16000), lambda p, n: log2(p) * (ALPHA + n * BETA)),
    ],
    ids=["ring", "direct", "one_shot", "doubling", "tree"],
)  # fmt: skip
def test_the_formulas(one, expected, p):
    assert price(lambda r: one(r, p), p) == pytest.approx(expected(p, 64000))


@pytest.mark.parametrize("size", [2, 3, 10])
def test_chain_is_a_pipeline_of_segments(size):
    n, segment = 4_000_000, 1000
    model = MODEL._replace(segment_bytes=segment)
    expected = (size - 1) * ALPHA + (n + (size - 2) * segment) * BETA
    assert price(lambda r: tree.chain(r, size, 0, n // 4), size, model) == pytest.approx(expected)


def test_a_deadlock_has_no_price():
    with pytest.raises(BrokenInvariantError, match="wait for each other"):
        predict([[Recv((1,), 0, 1), Send(1, 0, 1)], [Recv((0,), 0, 1), Send(0, 0, 1)]], 1, MODEL)


class TestHosts:
    """Ranks of one host share its interface."""

    MODEL = CostModel(1e-6, 1e-10, 0.0, hosts=(0, 0, 1, 1), wire_latency_s=1e-3, wire_byte_s=(1e-8, 1e-8))

    def test_two_ranks_send_to_two_others_over_one_wire(self):
        steps = [[Send(2, 0, 1000)], [Send(3, 0, 1000)], [Recv((0,), 0, 1000)], [Recv((1,), 0, 1000)]]
        assert predict(steps, 1, self.MODEL) == pytest.approx(1e-3 + 2 * 1000 * 1e-8)

    def test_the_slower_interface_limits_a_pair(self):
        model = self.MODEL._replace(wire_byte_s=(1e-8, 5e-8))
        steps = [[Send(2, 0, 1000)], [], [Recv((0,), 0, 1000)], []]
        assert predict(steps, 1, model) == pytest.approx(1e-3 + 1000 * 5e-8)

    def test_hierarchical_saves_the_wire(self):
        hosts, bounds = ((0, 1), (2, 3)), even_bounds(1_000_000, 4)
        flat = price(lambda r: direct.all_reduce(r, 4, bounds), 4, self.MODEL)
        deep = price(lambda r: hierarchy.all_reduce(r, hosts, bounds), 4, self.MODEL)
        assert 1.7 < flat / deep < 2.3

# ---- closed forms, beside replays of the schedules and beside what was published -----------------


QUICK = 8.4e-9  # seconds per byte at 1 Gbit/s


def gigabit(hosts):
    return model_of([Calibration()], [0])._replace(wire_latency_s=60e-6, wire_byte_s=(QUICK,) * hosts)


def replayed(kind, ranks, nbytes):
    size, count = sum(ranks), nbytes // 4
    host_of = tuple(host for host, places in enumerate(ranks) for _ in range(places))
    problems = [
        Problem(rank, size, count, even_bounds(count, size), hierarchy.hosts_of(host_of))
        for rank in range(size)
    ]
    model = gigabit(len(ranks))._replace(hosts=host_of)
    return predict([build("allreduce", kind, problem) for problem in problems], 4, model)


@pytest.mark.parametrize("kind", ["ring", "direct"])
@pytest.mark.parametrize("hosts", [2, 3, 16])
@pytest.mark.parametrize("nbytes", [4_000_000, 64_000_000])
def test_closed_forms_agree_with_replays_of_the_schedules(kind, hosts, nbytes):
    ranks = [1] * hosts
    closed_s = allreduce_s(kind, nbytes, gigabit(hosts), ranks)
    assert closed_s == pytest.approx(replayed(kind, ranks, nbytes), rel=0.12)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "float32", "int8"),
    [((1,) * 4, 1e8, "ring", "direct"), ((1,) * 4, 1e5, "direct", "direct"),
     ((1,) * 32, 1e5, "ring", "direct"), ((4, 4), 1e8, "hierarchical", "hierarchical"),
     ((4, 1), 1e8, "ring", "direct"), ((4,), 1e5, "direct", "direct")],
)  # fmt: skip
def test_the_best_algorithm(ranks, nbytes, float32, int8):
    """That of the runtime: with int8 no ring, and equal numbers of ranks add up within hosts first."""
    model = gigabit(len(ranks))
    assert best_allreduce(nbytes, model, ranks)[0] == float32
    coded = best_allreduce(nbytes, model, ranks, "int8")
    assert coded == (int8, allreduce_s(int8, nbytes * 260 / 1024, model, ranks))


def test_several_hosts():
    """A rank that measured represents its host; what was not measured is assumed."""
    calibrations = [
        Calibration(1e-10, 0.0, 0.0, 60e-6, 8.5e-9),
        Calibration(1e-10),
        Calibration(1e-10, 0.0, 0.0, 50e-6, 85e-9),
        Calibration(1e-10, 0.0, 0.0, 70e-6, 8.3e-9),
    ]
    model = model_of(calibrations, [4, 4, 7, 9])
    assert model.hosts == (0, 0, 1, 2)
    assert model.latency_s == coarse(LOCAL_LATENCY_S)
    assert model.wire_latency_s == coarse(60e-6)
    fast, slow, also_fast = model.wire_byte_s
    assert fast == also_fast == pytest.approx(8.4e-9, rel=0.01)
    assert slow == pytest.approx(85e-9)


class TestPart:
    """The ranks that are left of five on three hosts."""

    WHOLE = CostModel(
        1e-5, 1e-9, 1e-10, hosts=(0, 0, 1, 2, 2), wire_latency_s=1e-4, wire_byte_s=(1.0, 2.0, 3.0)
    )

    @pytest.mark.parametrize(
        "ranks, host_index, hosts, wires",
        [
            ([0, 1, 2, 3, 4], [0, 0, 1, 2, 2], (0, 0, 1, 2, 2), (1.0, 2.0, 3.0)),
            ([1, 3, 4], [0, 2, 2], (0, 1, 1), (1.0, 3.0)),
            ([4, 2, 0], [5, 3, 9], (1, 0, 2), (2.0, 3.0, 1.0)),
        ],
        ids=["all", "one lost of two hosts", "another order"],
    )
    def test_hosts_keep_their_interfaces(self, ranks, host_index, hosts, wires):
        found = part_of(self.WHOLE, ranks, host_index)
        assert found == self.WHOLE._replace(hosts=hosts, wire_byte_s=wires)

    @pytest.mark.parametrize(
        "ranks, host_index",
        [([3, 4], [0, 0]), ([0, 1, 2], [0, 1, 1]), ([0, 1], [0, 1]), ([0, 2], [0, 0])],
        ids=["one host", "moved", "divided", "united"],
    )
    def test_others_are_measured(self, ranks, host_index):
        assert part_of(self.WHOLE, ranks, host_index) is None

    def test_ranks_of_one_host(self):
        one = CostModel(1e-5, 1e-9, 1e-10)
        assert part_of(one, [2, 0], [4, 4]) == one and part_of(one, [2, 0], [0, 1]) is None


def time_of(ranks, speeds, shares):
    """What the slowest interface takes, in vectors per unit of speed."""
    total = sum(ranks)
    return max((m + f * (total - 2 * m)) / b for m, b, f in zip(ranks, speeds, shares))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_shares_are_better(seed):
    dice = random.Random(seed)
    ranks = [dice.randint(1, 5) for _ in range(dice.randint(2, 5))]
    speeds = [dice.choice([0.1, 1.0, 2.5, 10.0]) for _ in ranks]
    best = time_of(ranks, speeds, interface_shares(ranks, speeds))
    for _ in range(500):
        parts = [dice.random() ** 4 for _ in ranks]
        assert time_of(ranks, speeds, [part / sum(parts) for part in parts]) >= best * (1 - 1e-9)
