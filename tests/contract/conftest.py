"""Fixtures for tests with a real rendezvous on the loopback: `service`, `no_leaks`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Callable, Iterator

import pytest

from tests.contract.service import Service, eventually, opened


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """After the test there are as many descriptors and threads as before."""
    before = opened()
    yield
    assert eventually(lambda: opened() == before), f"{opened()} instead of {before}"


@pytest.fixture
def service(no_leaks: None) -> Iterator[Callable[..., Service]]:
    """Makes rendezvous servers, stops them, and sees that nothing remains."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Service:
            made = Service(*args, **options)
            stack.callback(made.server.stop)
            return made

        yield make
