"""`case`: one algorithm after the other."""

from __future__ import annotations

import pytest

from tests.sim.cases import CASES


@pytest.fixture(params=list(CASES))
def make_case(request):
    """Makes the collective under test: `make_case(size, count, dtype)`."""
    return CASES[request.param]
