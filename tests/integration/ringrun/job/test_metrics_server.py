"""The page for Prometheus, over HTTP."""

from __future__ import annotations

import http.client
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.job.metrics_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, MetricsServer
from ringrun.watch.history import History
from tests.support.another_user import another_user
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


def place_of(address: str) -> Tuple[str, int]:
    host, _, port = address.split("/")[2].rpartition(":")
    return host, int(port)


def status_for(address: str, *lines: str) -> int:
    with socket.create_connection(place_of(address), LIMIT_S) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:{}", 200), ("LOCALHOST:{}", 200), ("127.0.0.1:{}", 200), ("[::1]:{}", 200),
     ("localhost", 403), ("evil.example:{}", 403), ("localhost.evil.example:{}", 403),
     ("127.0.0.1:{}@evil.example", 403), ("", 403)],
)  # fmt: skip
def test_only_this_machine_is_a_host(server: MetricsServer, host: str, status: int) -> None:
    """A page whose name was made to lead here (DNS rebinding) names its own host."""
    address = server.start()
    named = "Host: " + host.format(place_of(address)[1])
    assert status_for(address, "GET /metrics HTTP/1.1", named) == status


def test_requests_that_are_not_served(server: MetricsServer) -> None:
    address = server.start()
    host = f"Host: 127.0.0.1:{place_of(address)[1]}"
    assert status_for(address, "GET /metrics HTTP/1.1") == 403
    assert status_for(address, "GET /metrics HTTP/1.1", host, "Host: evil.example") == 403
    assert status_for(address, "POST /metrics HTTP/1.1", host) == 405
    assert status_for(address, "GET /metrics", host) == 400
    with socket.create_connection(place_of(address), LIMIT_S) as connection:
        connection.sendall(b"x" * MAX_REQUEST_BYTES)
        assert connection.recv(1) == b""
    assert fetch(address) == ""


def test_a_request_may_come_in_pieces_and_a_reader_may_be_slow(server: MetricsServer) -> None:
    address = server.start()
    server._text = b"x" * (1 << 23)
    with socket.create_connection(place_of(address), LIMIT_S) as connection:
        for piece in ("GET /metr", f"ics HTTP/1.1\r\nHost: 127.0.0.1:{place_of(address)[1]}\r", "\n\r\n"):
            connection.sendall(piece.encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.read() == server._text


FLOODS = """
socks = []
for _ in range(int(sys.argv[2])):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", int(sys.argv[1])))
    socks.append(sock)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts descriptors by /proc")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_silent_connections_take_few_descriptors_and_no_threads(server: MetricsServer) -> None:
    address = server.start()
    fetch(address)
    threads, descriptors = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    with another_user(FLOODS, place_of(address)[1], 200):
        most: List[int] = []
        for _ in range(3):
            fetch(address)  # past them: they give up their places
            most.append(len([*Path("/proc/self/fd").iterdir()]))
            assert threading.active_count() == threads
    assert max(most) <= descriptors + MAX_CONNECTIONS + 3, "those of the other user's process are three"


@pytest.mark.parametrize("twin", ["::", "::1", "::ffff:127.0.0.1"])
@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs another user")
def test_a_port_that_another_user_has_by_ipv6_too(server: MetricsServer, twin: str) -> None:
    """A socket that covers 127.0.0.1 is noticed; the address that is shown leads nowhere else."""
    with another_user(LISTENS, twin) as other_user:
        assert other_user.stdout is not None
        port = int(other_user.stdout.readline())
        taken = MetricsServer(port)
        if twin == "::1":
            address = taken.start()
            try:
                assert address == f"http://127.0.0.1:{port}/metrics" and fetch(address) == ""
            finally:
                taken.stop()
        else:
            with pytest.raises(ConfigError, match="Name a port that is not in use"):
                taken.start()
    address = server.start()
    with another_user(LISTENS, twin, place_of(address)[1]) as other_user:
        assert other_user.stdout is not None
        port = int(other_user.stdout.readline())
        assert (port != 0) is (twin == "::1"), "no other user can take the port meanwhile"
        assert fetch(address) == ""


LISTENS = """
sock = socket.socket(socket.AF_INET6)
sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
print("here", flush=True)
try:
    sock.bind((sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    sock.listen()
except OSError:
    print(0, flush=True)
else:
    print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""
