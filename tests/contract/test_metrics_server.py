"""The page for Prometheus, over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import Iterator

import pytest

from ringcomm.errors import ConfigError
from ringrun.job.metrics_server import MetricsServer
from ringrun.watch.history import History
from tests.unit.ringrun.watch.samples import HOSTS, report

LIMIT_S = 60.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(0)
    yield made
    made.stop()


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
        return text


def test_the_newest_numbers_are_served(server: MetricsServer) -> None:
    address = server.start()
    assert address.startswith("http://127.0.0.1:") and fetch(address) == ""
    history = History(0.0)
    for steps in (3, 8):
        history.take(0, report(0, float(steps), steps=steps), float(steps))
        server.update(history, HOSTS)
        assert f" {steps}\n" in fetch(address + "?of=now")


def test_there_is_no_other_page(server: MetricsServer) -> None:
    address = server.start()
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(address.replace("/metrics", "/"))
    with caught.value as problem:
        assert problem.code == 404


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port {port}: .*Name a port that is not in use"):
            MetricsServer(port).start()


def test_the_port_is_closed_at_the_end(server: MetricsServer) -> None:
    server.stop()  # before the start
    address = server.start()
    server.stop()
    server.stop()
    with pytest.raises(urllib.error.URLError):
        fetch(address)
