"""Another user holds the same port at the IPv6 twin of an address: ``::1``, ``::``, ``::ffff:127.0.0.1``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, List

import pytest

from ringcomm.transport.connect import Dial
from ringcomm.transport.reactor import Reactor
from tests.support.another_user import another_user
from tests.support.service import CLAIM, KEY, Door

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux hands out ports"),
]

HOLDS = """
import errno
address, port, relayed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sock = socket.socket(socket.AF_INET6)
sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
print("here", flush=True)
try:
    sock.bind((address, port))
    sock.listen()
except OSError as problem:
    print(errno.errorcode[problem.errno], flush=True)
    sys.exit()
print(sock.getsockname()[1], flush=True)
while True:
    one = sock.accept()[0]
    if relayed == "relay":
        other = socket.socket()
        other.connect(("127.0.0.1", port))
    if relayed != "relay":
        one.recv(1000)
        one.sendall(b"something else" * 100)
        one.close()
    elif not os.fork():
        ends = {one: other, other: one}
        while True:
            for end in select.select(list(ends), [], [])[0]:
                data = end.recv(65536)
                if not data:
                    os._exit(0)
                ends[end].sendall(data)
    else:
        one.close()
        other.close()
"""


def holds(address: str, port: int, what: str = "answer") -> Any:
    return another_user(HOLDS, address, port, what)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def dialled(reactor: Reactor, door: Door, address: str) -> Dial:
    ends: List[Dial] = []
    Dial(reactor, (address, door.address[1]), KEY, CLAIM, ends.append, 5.0)
    door.turn_until(lambda: ends)
    return ends[0]


@pytest.mark.parametrize("what", ["answer", "relay"])
def test_what_listens_at_the_twin_cannot_take_part(reactor: Reactor, what: str) -> None:
    """Also one that passes everything on to 127.0.0.1: the proof names ::1, where it was dialled."""
    door = Door(reactor)
    try:
        with holds("::1", door.address[1], what) as other_user:
            assert said(other_user) == str(door.address[1])
            dial = dialled(reactor, door, "::1")
            assert dial.sock is None and door.arrived == []
            if what == "relay":
                door.turn_until(lambda: door.refused)
                assert f"dialled [::1]:{door.address[1]}" in door.refused[0], door.refused
    finally:
        door.close()
