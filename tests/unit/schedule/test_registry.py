"""The table of algorithms: what may be registered, and where an algorithm may be used."""

from __future__ import annotations

import pytest

from ringcomm.errors import BrokenInvariantError, ConfigError
from ringcomm.schedule import algorithms as _algorithms  # noqa: F401  registers them
from ringcomm.schedule import registry
from ringcomm.schedule.registry import Algorithm, Problem


class TestRegister:
    def test_names_are_unique(self):
        with pytest.raises(BrokenInvariantError, match="two allreduce algorithms are called 'ring'"):
            registry.register(Algorithm("allreduce", "ring", lambda problem: []))

    def test_collectives_are_known(self):
        with pytest.raises(BrokenInvariantError, match="no collective 'gossip'"):
            registry.register(Algorithm("gossip", "ring", lambda problem: []))

    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(ConfigError, match="'halving'; there are one_shot, direct"):
            registry.algorithm("allreduce", "halving")


class TestUsable:
    @pytest.mark.parametrize(
        ("limits", "size", "count", "single", "usable"),
        [
            ({}, 100, 10**6, False, True),
            ({}, 2, 1, True, False),
            ({"single_fold": True}, 2, 1, True, True),
            ({"min_ranks": 3}, 2, 1, False, False),
            ({"min_ranks": 3}, 3, 1, False, True),
            ({"max_ranks": 3}, 3, 1, False, True),
            ({"max_ranks": 3}, 4, 1, False, False),
            ({"max_bytes": 1024}, 2, 127, False, True),
            ({"max_bytes": 1024}, 2, 128, False, False),
            ({"needs_hosts": True}, 4, 1, False, False),
        ],
    )
    def test_limits(self, limits, size, count, single, usable):
        algorithm = Algorithm("allreduce", "x", lambda problem: [], **limits)
        assert algorithm.usable(Problem(0, size, count), 8, single) == usable

    def test_several_hosts(self):
        algorithm = Algorithm("allreduce", "x", lambda problem: [], needs_hosts=True)
        assert algorithm.usable(Problem(0, 4, 1, hosts=((0, 1), (2, 3))), 8, False)
