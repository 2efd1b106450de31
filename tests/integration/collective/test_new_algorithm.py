"""A new algorithm is one module: registered, priced, selected, proved, and run like those that are here."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.ops import Sum
from ringcomm.schedule import registry
from ringcomm.schedule.cost import CostModel
from ringcomm.schedule.select import Selector
from ringcomm.testing.cluster import run_ranks
from tests.support.prover.verify import check_all_reduce

HALVING = '''
"""Recursive halving and doubling, for a power of two ranks (Rabenseifner 2004)."""

from ringcomm.schedule.registry import Algorithm, register
from ringcomm.schedule.steps import SELF, Recv, Send


def all_reduce(rank, size, bounds):
    assert size & (size - 1) == 0
    halving, kept, doubling = [], (0, size), []
    distance = size // 2
    while distance:
        peer, middle = rank ^ distance, (kept[0] + kept[1]) // 2
        low, high = (kept[0], middle), (middle, kept[1])
        mine, others = (low, high) if rank < peer else (high, low)
        fold = (SELF, peer) if rank < peer else (peer, SELF)
        halving.append(Send(peer, bounds[others[0]], bounds[others[1]]))
        halving.append(Recv((peer,), bounds[mine[0]], bounds[mine[1]], fold=fold, final=distance == 1))
        doubling[:0] = [
            Send(peer, bounds[mine[0]], bounds[mine[1]]),
            Recv((peer,), bounds[others[0]], bounds[others[1]]),
        ]
        kept, distance = mine, distance // 2
    return halving + doubling


register(Algorithm("allreduce", "halving", lambda p: all_reduce(p.rank, p.size, p.bounds)))
'''


@pytest.fixture
def halving(tmp_path, monkeypatch):
    """The algorithm above, in a package of its own that is imported."""
    package = tmp_path / "my_algorithms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "halving.py").write_text(HALVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._TABLE, "allreduce", dict(registry._TABLE["allreduce"]))
    __import__("my_algorithms.halving")
    yield
    for name in ("my_algorithms", "my_algorithms.halving"):
        del sys.modules[name]


MANY_RANKS = CostModel(latency_s=50e-6, byte_s=8e-9, reduce_byte_s=0.1e-9)


def test_it_is_selected_where_it_is_cheapest(halving):
    heard = []
    first = Selector(0, 32, report=heard.append)
    first.adopt(MANY_RANKS)
    others = [Selector(rank, 32, "halving") for rank in range(1, 32)]
    built = [selector.all_reduce(25_000, 4, False) for selector in (first, *others)]
    assert heard[-1].split(": ")[1].startswith("halving ")
    check_all_reduce(built, 25_000)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_it_is_proved(halving, size):
    selectors = [Selector(rank, size, "halving") for rank in range(size)]
    for count in (0, 1, size, 37):
        check_all_reduce([selector.all_reduce(count, 8, False) for selector in selectors], count)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_it_runs(halving, transport):
    def work(context):
        found = []
        for count in (0, 1, 37, 300_000):
            found.append(context.allreduce(np.arange(count) + 10.0 * context.rank, op=Sum))
        return found

    for arrays in run_ranks(4, work, transport=transport, settings=Settings(algorithm="halving")):
        for array in arrays:
            assert (array == 4.0 * np.arange(array.size) + 60.0).all()
