"""`make_case`: one algorithm after the other. `first`: blocks of seeds."""

from __future__ import annotations

import pytest

from tests.sim.cases import CASES

BLOCK = 25


def pytest_generate_tests(metafunc):
    """Blocks of seeds, so that several processes can share them."""
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--schedules"), BLOCK))


@pytest.fixture(params=list(CASES))
def make_case(request):
    """Makes the collective under test: `make_case(size, count, dtype)`."""
    return CASES[request.param]
