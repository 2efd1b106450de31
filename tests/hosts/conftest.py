"""Fixtures for tests on several hosts: `lab`, and `make_lab` for hosts of another kind.

Where the machine cannot make network namespaces the tests are skipped with the reason; with CI=true or
RINGCOMM_REQUIRE_HOSTS=1 they fail with it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from tests.hosts.netlab import Lab


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark every test in this directory with `hosts`."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def able() -> None:
    """This machine can make a lab; skips, or fails where that is required."""
    reason = Lab.unavailable()
    if reason is None:
        return
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in ("CI", "RINGCOMM_REQUIRE_HOSTS")):
        pytest.fail(f"cannot make several hosts here, and that is required: {reason}", pytrace=False)
    pytest.skip(f"cannot make several hosts here: {reason}")


@pytest.fixture(scope="session")
def session_lab(able: None) -> Iterator[Lab]:
    """The one lab that `lab` lends to each test."""
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """Two hosts, jetson1 and jetson2, shared by all tests; faults and processes go after each one."""
    yield session_lab
    session_lab.restore()


@pytest.fixture
def make_lab(able: None) -> Iterator[Callable[..., Lab]]:
    """`Lab(...)` started, and closed at the end of the test."""
    with ExitStack() as stack:

        def make(*hosts: Any, **options: Any) -> Lab:
            return stack.enter_context(Lab(*hosts, **options))

        yield make
