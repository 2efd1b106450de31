"""What ranks do before the first call: what is measured, what it is used for, and what is pointed out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.group.view import Peer
from ringcomm.job import preparation as module
from ringcomm.job.preparation import Preparation, Prepared
from ringcomm.schedule.cost import CostModel

MODEL = CostModel(1e-5, 1e-9, 1e-10)
FAST, SLOW = 1e-8, 1e-6
"""Seconds per byte of an interface."""


def over_hosts(*wires):
    """The model of hosts with one rank each and these interfaces."""
    return MODEL._replace(hosts=tuple(range(len(wires))), wire_latency_s=1e-4, wire_byte_s=wires)


class Job:
    """The part of a job that a preparation uses, seen from one rank: runners' settings and names of
    exchanges, reports to the selector, and warnings at the launcher are kept.
    """

    def __init__(self, hosts, rank=0, joined=True, **settings):
        self.rank, self.size = rank, len(hosts)
        locals_ = [hosts[:place].count(host) for place, host in enumerate(hosts)]
        self.peers = [
            Peer(number, f"host{host}", host, local, 1)
            for number, (host, local) in enumerate(zip(hosts, locals_))
        ]
        self.runners, self.adopted, self.warned = [], [], []
        link = SimpleNamespace(carrier="TCP")
        channels = SimpleNamespace(direct=SimpleNamespace(link=lambda peer: link))
        control = SimpleNamespace(warn=lambda *what: self.warned.append(what))
        group = SimpleNamespace(
            runner=SimpleNamespace(with_settings=self._with_settings), channels=channels, rank=rank,
            size=self.size, peers=self.peers, settings=Settings(**settings),
            control=control if joined else None,
            hosts=[peer.host for peer in self.peers], local_size=hosts.count(hosts[rank]), generation=7,
        )  # fmt: skip
        self.prepared = Preparation(group)

    def _with_settings(self, settings):
        runner = SimpleNamespace(settings=settings, purpose=None)
        self.runners.append(runner)
        return runner

    def adopt(self, model):
        self.adopted.append(model)


@pytest.fixture
def machine(monkeypatch):
    """The cores of this host, what a measurement finds, and what other ranks agree to."""
    found = SimpleNamespace(cores=4, model=MODEL, others=lambda row: [row, row], asked=[], measured=0)

    def measure(runner, hosts):
        found.measured += 1
        return found.model

    def gathered(runner, row):
        found.asked.append(row[:2])
        return np.array(found.others(row), float)

    monkeypatch.setattr(module, "own_cores", lambda: (0, found.cores))
    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "gathered", gathered)
    return found


class TestTuning:
    @pytest.mark.parametrize(
        "hosts, cores, measured",
        [([0, 0], 2, True), ([0, 0, 0], 2, False), ([0, 0, 0, 1], 2, True), ([0], 1, True)],
        ids=["cores", "crowded", "hosts", "alone"],
    )
    def test_what_is_worth_measuring(self, machine, hosts, cores, measured):
        machine.cores = cores
        job = Job(hosts)
        assert job.prepared.tune(job) == (MODEL if measured else None)
        assert machine.asked == [[True, -1]] and machine.measured == measured
        assert job.adopted == [MODEL if measured else None]

    @pytest.mark.parametrize("own, is_measured", [((0, 1), False), ((1, 1), True)], ids=["one core", "two"])
    def test_ranks_on_cores_of_their_own_are_not_crowded(self, machine, own, is_measured):
        """Each of two ranks may run on one core only."""
        machine.cores, machine.others = 1, lambda row: [row, [*row[:3], *own]]
        job = Job([0, 0])
        job.prepared.tune(job)
        assert machine.measured == is_measured

    def test_all_ranks_measure_or_none_does(self, machine):
        machine.others = lambda row: [row, [False, -1, -1, 0, 4]]
        job = Job([0, 1])
        assert job.prepared.tune(job) is None and machine.measured == 0
        assert job.adopted == [None]


class TestAfterALoss:
    WIRES = over_hosts(FAST, SLOW, FAST)

    def test_ranks_that_have_measured_together_do_not_do_it_again(self, machine):
        """Ranks 1 and 2 of the earlier view are left, on hosts that have other numbers now."""
        machine.others = lambda row: [row, [*row[:2], 1, *row[3:]]]
        job = Job([0, 1])
        model = job.prepared.tune(job, Prepared(3, 2, self.WIRES))
        assert machine.measured == 0 and job.prepared.is_repeated
        assert (model.hosts, model.wire_byte_s) == ((0, 1), (FAST, SLOW))
        assert job.adopted == [model] and job.prepared.prepared == Prepared(7, 0, model)

    @pytest.mark.parametrize("generation", [-1, 2], ids=["new", "another view"])
    def test_with_a_rank_of_another_view_all_measure(self, machine, generation):
        machine.others = lambda row: [row, [row[0], generation, 1, *row[3:]]]
        job = Job([0, 1])
        assert job.prepared.tune(job, Prepared(3, 2, self.WIRES)) == MODEL
        assert machine.measured == 1 and not job.prepared.is_repeated
        assert job.prepared.prepared == Prepared(7, 0, MODEL)
