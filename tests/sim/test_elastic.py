"""Elastic jobs on bad networks: right numbers, or the same error on all members of a view; no view twice.

`--schedules 10000` runs more seeds; `ElasticSim(seed).run()` repeats the one that a failure names.
"""

from __future__ import annotations

from tests.sim.elastic import ElasticSim

BLOCK = 100


def pytest_generate_tests(metafunc):
    """Blocks of seeds, so that several processes can share them."""
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--schedules"), BLOCK))


def test_right_numbers_or_the_same_error_on_all_members(first):
    for seed in range(first, first + BLOCK):
        ElasticSim(seed).run()
