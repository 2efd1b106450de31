"""Fixtures: a real rendezvous (`service`), `no_leaks`, a `reactor`, `runtime` of launchers."""

from __future__ import annotations

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from ringcomm.rendezvous import links
from ringcomm.transport import arena
from ringcomm.transport.connect import listen, release_spare
from ringcomm.transport.nics import LOOPBACK
from ringcomm.transport.reactor import Reactor
from ringrun.reach import base
from tests.support.service import Service, eventually, opened, remains


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """After the test there are no more descriptors and threads than before."""
    arena.own()  # a process keeps it
    release_spare()  # descriptors that are kept while any test's membership lives
    before = opened()
    yield
    release_spare()
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
def reactor(no_leaks: None) -> Iterator[Reactor]:
    """A loop that the test turns."""
    reactor = Reactor()
    yield reactor
    reactor.close()


@pytest.fixture
def refusing() -> Iterator[Dict[str, Any]]:
    """An address at which no connection is accepted, as a rank would offer it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address, port = taken.getsockname()
        yield {"address": address, "port": port, "iface": "lo", "kind": LOOPBACK}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of control sockets, with a short path; names that start with "local" are this machine."""
    local = lambda specs, **_: [spec.name.startswith("local") for spec in specs]  # noqa: E731
    monkeypatch.setattr(base, "find_local", local)
    with tempfile.TemporaryDirectory(prefix="ringrun-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name) / "ringrun"


@pytest.fixture
def rank_ports(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """The ports on which ranks of this process have listened on 127.0.0.1, as they come."""
    ports: List[int] = []

    def spy(address: str, *args: Any, **options: Any) -> socket.socket:
        sock = listen(address, *args, **options)
        if address == "127.0.0.1":
            ports.append(sock.getsockname()[1])
        return sock

    monkeypatch.setattr(links, "listen", spy)
    return ports
