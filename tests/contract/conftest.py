"""Fixtures for tests with a real rendezvous on the loopback: `service`, `no_leaks`; and `as_default`."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Callable, Iterator

import pytest

from ringcomm import api
from ringcomm.context import Context
from tests.contract.service import Service, eventually, opened, remains


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """After the test there are no more descriptors and threads than before."""
    before = opened()
    yield
    assert eventually(lambda: not remains(before)), remains(before)


@pytest.fixture
def service(no_leaks: None) -> Iterator[Callable[..., Service]]:
    """Makes rendezvous servers, stops them, and sees that nothing remains."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Service:
            made = Service(*args, **options)
            stack.callback(made.server.stop)
            return made

        yield make


@pytest.fixture
def as_default(monkeypatch: pytest.MonkeyPatch) -> Callable[[Context], None]:
    """Lets every thread have a default context of its own, as every process has."""
    mine = threading.local()

    def context() -> Context:
        found: Context = mine.context
        return found

    monkeypatch.setattr(api, "context", context)
    monkeypatch.setattr(api, "is_initialized", lambda: hasattr(mine, "context"))
    return lambda context: setattr(mine, "context", context)
