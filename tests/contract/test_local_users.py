"""Other users of the machine, at the Unix sockets between the ranks of a host."""

from __future__ import annotations

import os
import secrets
import sys
from types import SimpleNamespace

import pytest

from ringcomm.errors import StartTimeoutError
from ringcomm.transport import nics
from ringcomm.transport.accept import MOST_HALF_OPEN
from ringcomm.transport.connect import Dial, listen
from ringcomm.transport.rate_limit import TokenBucket
from ringcomm.transport.reactor import Reactor
from tests.contract.another_user import OTHER_USER, another_user
from tests.contract.service import CLAIM, KEY, Door, Service

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets are Linux's"),
]
CONNECTS = """
socks = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for sock in socks:
    sock.connect(chr(0) + sys.argv[1])
print("connected", flush=True)
print(sum(sock.recv(1) == b"" for sock in socks), flush=True)
sys.stdin.read()
"""

LISTENS = """
sock = socket.socket(socket.AF_UNIX)
sock.bind(chr(0) + sys.argv[1])
sock.listen()
print("listening", flush=True)
print(sock.accept()[0].recv(1000), flush=True)
"""

FLOODS = """
socks, until = [], time.monotonic() + float(sys.argv[1])
print("looking", flush=True)
while time.monotonic() < until:
    with open("/proc/net/unix") as file:
        names = {line.split()[-1][1:] for line in file if " @ringcomm-" + sys.argv[2] in line}
    for name in names:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(chr(0) + name)
        except OSError:
            sock.close()
        else:
            socks.append(sock)
            if len(socks) > 600:
                socks.pop(0).close()
    time.sleep(0.0005)
"""


@pytest.fixture
def reactor(no_leaks):
    reactor = Reactor()
    yield reactor
    reactor.close()


@pytest.fixture
def name():
    return f"@ringcomm-test-{secrets.token_hex(8)}"


def test_silent_connections_of_another_user_are_closed_at_once_and_take_no_place(reactor, name):
    allowance = TokenBucket(1.0, 400.0, lambda: 0.0)
    door = Door(reactor, listen(name), allowance)
    many, ends = 2 * MOST_HALF_OPEN, []
    try:
        with another_user(CONNECTS, name[1:], many) as other_user:
            Dial(reactor, (name, 0), KEY, CLAIM, ends.append, 10.0)
            door.turn_until(lambda: ends and door.arrived)
            assert ends[0].reason == ""
            door.turn_until(lambda: len(door.refused) == many)
            assert set(door.refused) == {f"it belongs to another user (number {OTHER_USER})"}
            assert other_user.stdout.readline() == f"{many}\n", "closed, and not one byte to read"
            assert allowance.left > 400 - many / 2
    finally:
        door.close()
        for dial in ends:
            dial.sock.close()


def test_a_socket_of_another_user_is_told_nothing(reactor, name):
    ends = []
    with another_user(LISTENS, name[1:]) as other_user:
        Dial(reactor, (name, 0), KEY, CLAIM, ends.append, 5.0)
        while not ends:
            reactor.run_once(0.1)
        assert ends[0].sock is None
        assert ends[0].reason == f"it belongs to another user (number {OTHER_USER})"
        assert other_user.stdout.readline() == "b''\n"


def test_a_failed_start_says_how_many_were_turned_away(monkeypatch):
    # The flood is for the sockets of this test, not for those of tests that run beside it.
    mark = secrets.token_hex(8)
    named = SimpleNamespace(token_hex=lambda count: mark + secrets.token_hex(count - 8))
    monkeypatch.setattr(nics, "secrets", named)
    service = Service(2, start_timeout_s=2.0)
    try:
        with another_user(FLOODS, 30, mark), pytest.raises(StartTimeoutError) as caught:
            service.start(0)
        assert "This process turned away " in str(caught.value)
        assert f"(mostly this host: it belongs to another user (number {OTHER_USER}))" in str(caught.value)
    finally:
        service.server.stop()
