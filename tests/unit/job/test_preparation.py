"""What ranks do before the first call: what is measured, what it is used for, and what is pointed out."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.group.group import Peer
from ringcomm.job import preparation as module
from ringcomm.job.preparation import Prepared, own_files, tune
from ringcomm.schedule.cost import CostModel
from ringcomm.transport.memory import memory_fabrics

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
            size=self.size, relayed=frozenset(), peers=self.peers, settings=Settings(**settings),
            control=control if joined else None,
            hosts=[peer.host for peer in self.peers], local_size=hosts.count(hosts[rank]), generation=7,
        )  # fmt: skip
        self.group = group

    def _with_settings(self, settings):
        runner = SimpleNamespace(settings=settings, purpose=None)
        self.runners.append(runner)
        return runner

    def tune(self, before=None):
        """The measured links."""
        self.prepared, self.is_repeated = tune(self.group, self, before)
        return self.prepared.model

    def adopt(self, model):
        self.adopted.append(model)


@pytest.fixture
def machine(monkeypatch):
    """The cores of this host, what a measurement finds, and what other ranks agree to."""
    found = SimpleNamespace(cores=4, model=MODEL, others=lambda row: [row, row], asked=[], measured=0)

    def measure(runner, hosts, relayed):
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
        assert job.tune() == (MODEL if measured else None)
        assert machine.asked == [[True, -1]] and machine.measured == measured
        assert job.adopted == [MODEL if measured else None]

    def test_all_ranks_measure_or_none_does(self, machine):
        machine.others = lambda row: [row, [False, -1, -1, 0, 4]]
        job = Job([0, 1])
        assert job.tune() is None and machine.measured == 0
        assert job.adopted == [None]


class TestAfterALoss:
    WIRES = over_hosts(FAST, SLOW, FAST)

    def test_ranks_that_have_measured_together_do_not_do_it_again(self, machine):
        """Ranks 1 and 2 of the earlier view are left, on hosts that have other numbers now."""
        machine.others = lambda row: [row, [*row[:2], 1, *row[3:]]]
        job = Job([0, 1])
        model = job.tune(Prepared(3, 2, self.WIRES))
        assert machine.measured == 0 and job.is_repeated
        assert (model.hosts, model.wire_byte_s) == ((0, 1), (FAST, SLOW))
        assert job.adopted == [model] and job.prepared == Prepared(7, 0, model)

    @pytest.mark.parametrize("generation", [-1, 2], ids=["new", "another view"])
    def test_with_a_rank_of_another_view_all_measure(self, machine, generation):
        machine.others = lambda row: [row, [row[0], generation, 1, *row[3:]]]
        job = Job([0, 1])
        assert job.tune(Prepared(3, 2, self.WIRES)) == MODEL
        assert machine.measured == 1 and not job.is_repeated
        assert job.prepared == Prepared(7, 0, MODEL)

# ---- whether all hosts run the same files --------------------------------------------------------


HOSTS = ["pc", "jetson1", "jetson1", "jetson2"]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(name, path, text)` makes a file below a folder, and a module of it that has been imported."""

    def load(name, path, text="pass", spec=None):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__spec__ = spec
        monkeypatch.setitem(sys.modules, name, module)

    return load


def test_the_script_and_what_it_imports_from_its_folder(load, tmp_path):
    load("__main__", "project/train.py")
    load("model", "project/model.py")
    load("package.part", "project/package/part.py")
    load("elsewhere", "other/elsewhere.py")
    load("numpy.fake", "project/.venv/lib/python3.11/site-packages/numpy/fake.py")
    load("ringcomm.fake", "project/ringcomm/fake.py")
    found = own_files()
    assert sorted(found) == ["model.py", "package/part.py", "train.py"]
    load("model", "project/model.py", "other")
    again = own_files()
    assert [name for name in found if again[name] != found[name]] == ["model.py"]


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ([{"a.py": "1"}, {"a.py": "1"}], ""),
        ([{"a.py": "1"}, {}], ""),  # a notebook has no files
        ([{"a.py": "1"}, {"a.py": "2"}], "a.py"),
    ],
)
def test_ranks_exchange_what_they_run_if_it_differs(monkeypatch, programs, expected):
    mine = threading.local()
    monkeypatch.setattr(module, "own_files", lambda: mine.files)

    def work(fabric):
        mine.files = programs[fabric.rank]
        return module.compare_programs(Runner(fabric, Settings(timeout_s=20.0)), HOSTS[:2])

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(work, memory_fabrics(2))
    assert first == other and (expected in first if expected else first == "")
