"""What is chosen on machines that one can picture, and that all ranks choose alike."""

from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringcomm.schedule import hierarchy
from ringcomm.schedule.cost import CostModel
from ringcomm.schedule.registry import algorithm
from ringcomm.schedule.select import Selector, rule_for_all_reduce
from ringcomm.schedule.steps import Recv, Send, even_bounds
from tests.support.prover.verify import (
    check_all_gather,
    check_all_reduce,
    check_broadcast,
    check_reduce_scatter,
)
from tests.unit.schedule.building import make, names

GIGABIT = 8e-9
KIB, MIB = 1024, 1024 * 1024


def network(*byte_s, places=1, latency_s=50e-6):
    """Hosts with these interfaces and so many ranks each."""
    hosts = tuple(host for host in range(len(byte_s)) for _ in range(places))
    return CostModel(15e-6, 0.25e-9, 0.1e-9, 4e-6, hosts=hosts, wire_latency_s=latency_s, wire_byte_s=byte_s)


def selectors(model, heard=None, **options):
    """One for each rank."""
    found = []
    for rank in range(len(model.hosts)):
        report = heard.append if heard is not None and rank == 0 else None
        found.append(Selector(rank, len(model.hosts), host_index=model.hosts, report=report, **options))
        found[-1].adopt(model)
    return found


def name_of(model, length_bytes, single=False):
    heard = []
    (first, *_) = selectors(model, heard)
    first.all_reduce(length_bytes // 4, 4, single)
    return heard[-1].split(": ")[1].split(" ")[0]


def relayed_bytes(model, count):
    """What an all-reduce of so many float32 sends over the relay."""
    schedules = [one.all_reduce(count, 4, False) for one in selectors(model)]
    return sum(
        4 * (step.stop - step.start)
        for rank, steps in enumerate(schedules) for step in steps
        if isinstance(step, Send) and tuple(sorted((rank, step.peer))) in model.relayed
    )  # fmt: skip


class TestRelayedLinks:
    """Two machines at home, 20 Mbit/s each, and a third that both reach."""

    HOME = network(GIGABIT, 4e-7, 4e-7, latency_s=0.04)
    RELAYED = HOME._replace(relayed=frozenset({(1, 2)}))

    @pytest.mark.parametrize("length_bytes", [MIB, 16 * MIB])
    def test_nothing_is_relayed_where_another_host_reaches_all(self, length_bytes):
        assert relayed_bytes(self.RELAYED, length_bytes // 4) == 0
        assert name_of(self.RELAYED, length_bytes) == "direct"


class TestAllReduce:
    def test_a_ring_for_long_messages_between_hosts_whose_links_are_slow(self):
        slow = [10 * GIGABIT] * 3
        assert [name_of(network(*slow), size) for size in (256 * KIB, MIB, 64 * MIB)] == [
            "direct", "ring", "ring",
        ]  # fmt: skip
        assert name_of(network(*slow[:2]), 64 * MIB) == "direct"  # nothing comes from two hosts at once
        assert name_of(network(*slow), 64 * MIB, single=True) == "direct"
        # A ring would carry a quarter more over each interface.
        assert name_of(network(*slow, places=2), 64 * MIB) == "hierarchical"
        # One slow link gets a small chunk instead.
        assert name_of(network(*slow[:1], GIGABIT, GIGABIT, GIGABIT), 64 * MIB) == "direct"

    def test_a_size_is_priced_where_it_lies(self):
        model = CostModel(2e-6, 0.5e-9, 0.06e-9, 4e-6, hosts=(0, 0, 0, 0), wire_byte_s=(GIGABIT,))
        assert [name_of(model, size * KIB) for size in (16, 18, 20, 24, 28)] == [
            "doubling", "doubling", "doubling", "direct", "direct",
        ]  # fmt: skip
        heard = []
        for selector in selectors(model, heard):
            for count in (6 * KIB, 4 * KIB, 4 * KIB + 1):  # The first call of a class decides nothing.
                selector.all_reduce(count, 4, False)
        assert [text.split(" (")[0] for text in heard[1:]] == [
            "allreduce of 24576 to 26623 bytes: direct", "allreduce of 16384 to 18431 bytes: doubling",
        ]  # fmt: skip

    @pytest.mark.parametrize("model", [
        network(GIGABIT, GIGABIT), network(80e-9, GIGABIT, GIGABIT), network(GIGABIT, 80e-9, places=3),
    ])  # fmt: skip
    @pytest.mark.parametrize("count", [0, 1, 50, 5000, 300_000])
    def test_all_ranks_fit_together(self, model, count):
        size = len(model.hosts)
        for single in (False, True):
            built = [selector.all_reduce(count, 4, single) for selector in selectors(model)]
            check_all_reduce(built, count, single_fold=single)
        bounds = even_bounds(count, size)
        check_reduce_scatter([s.reduce_scatter(bounds, 4, False) for s in selectors(model)], bounds)
        check_all_gather([s.all_gather(bounds, 4) for s in selectors(model)], bounds)
        check_broadcast([s.broadcast(size - 1, count, 4) for s in selectors(model)], size - 1, count)

    def test_a_slow_link_gets_a_small_chunk(self):
        model = network(80e-9, GIGABIT, GIGABIT, GIGABIT)
        for rank, selector in enumerate(selectors(model)):
            (fold,) = [step for step in selector.all_reduce(3_000_000, 4, False)
                       if isinstance(step, Recv) and step.fold]  # fmt: skip
            assert fold.stop - fold.start == (0 if rank == 0 else 1_000_000)

    def test_the_user_decides(self):
        model = network(GIGABIT, GIGABIT, places=2)
        for name in names("allreduce", hosts=True):
            (first, *_) = selectors(model, override=name)
            hosts = hierarchy.hosts_of(model.hosts)
            assert first.all_reduce(100, 4, False) == make("allreduce", name, 0, 4, 100, hosts=hosts)
        lonely = Selector(0, 3, "hierarchical", [0, 1, 2])
        assert lonely.all_reduce(100, 4, False) == make("allreduce", "direct", 0, 3, 100)
        with pytest.raises(ConfigError, match="hierarchical"):
            Selector(0, 3, "magic").all_reduce(1, 4, False)


class TestWithoutAModel:
    def test_a_grid_of_ranks_saves_the_wire(self):
        heard = []
        selector = Selector(0, 4, host_index=[0, 0, 1, 1], report=heard.append)
        selector.all_reduce(MIB, 4, False)
        selector.reduce_scatter(even_bounds(MIB, 4), 4, False)
        selector.all_gather(even_bounds(MIB, 4), 4)
        selector.all_reduce(MIB, 2, True)
        assert [text.split(": ")[1] for text in heard] == ["hierarchical"] * 3 + ["direct"]


class TestByRule:
    @pytest.mark.parametrize(
        ("size", "length_bytes", "single", "expected"),
        [
            (1, 4, False, "one_shot"), (2, 64 * KIB, False, "one_shot"), (2, 64 * KIB + 4, False, "direct"),
            (16, 8 * KIB, True, "one_shot"), (16, 8 * KIB + 4, False, "direct"),
            (17, 128 * KIB, False, "doubling"), (17, 128 * KIB + 4, False, "ring"), (17, 4, True, "direct"),
        ],
    )  # fmt: skip
    def test_all_reduce(self, size, length_bytes, single, expected):
        assert rule_for_all_reduce(size, length_bytes // 4, 4, needs_single_fold=single) == expected

    @pytest.mark.parametrize("name", names("allreduce"))
    def test_a_choice_of_the_user_that_would_round_at_every_hop(self, name):
        assert rule_for_all_reduce(4, 10, 4, needs_single_fold=False, override=name) == name
        expected = name if algorithm("allreduce", name).single_fold else "direct"
        assert rule_for_all_reduce(4, 10, 4, needs_single_fold=True, override=name) == expected


def test_schedules_are_built_once():
    selector = Selector(1, 3)
    assert selector.all_reduce(10, 4, False) is selector.all_reduce(10, 4, False)
    assert selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3)) is selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3))
