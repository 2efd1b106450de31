"""Other users of the machine: at Unix sockets of ranks and at the IPv6 twins of addresses."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from typing import Any, List

import pytest

from ringcomm.transport.connect import MAX_HALF_OPEN, Dial, listen
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Initiator, Purpose, job_digest, place_of
from ringrun.doctor.hosts import HostProbe
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from tests.support.another_user import OTHER_USER, another_user
from tests.support.service import CLAIM, KEY, Door

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

DIALS = """
print("begins", flush=True)
for line in sys.stdin:
    family, address, port, *sent = line.split()
    sock = socket.socket(int(family), socket.SOCK_STREAM)
    sock.settimeout(30.0)
    got = b""
    try:
        sock.connect((address, int(port)))
        for piece in sent:
            sock.sendall(bytes.fromhex(piece))
            got += sock.recv(4096)
        sock.shutdown(socket.SHUT_WR)
        while True:
            data = sock.recv(4096)
            if not data:
                break
            got += data
    except OSError as problem:  # a reset, seen by one call or the other
        got += b"late" if isinstance(problem, socket.timeout) else b""
    print(got.hex() or "nothing", flush=True)
"""

@pytest.fixture
def name():
    return f"@ringcomm-test-{secrets.token_hex(8)}"


def test_a_rank_gets_in_beside_silent_connections_of_another_user_which_are_closed_at_once(reactor, name):
    door = Door(reactor, listen(name))
    many, ends = 2 * MAX_HALF_OPEN, []
    try:
        with another_user(CONNECTS, name[1:], many) as other_user:
            Dial(reactor, (name, 0), KEY, CLAIM, ends.append, 10.0)
            door.turn_until(lambda: ends and door.arrived)
            assert ends[0].reason == ""
            door.turn_until(lambda: len(door.refused) == many)
            assert set(door.refused) == {f"it belongs to another user (number {OTHER_USER})"}
            assert other_user.stdout.readline() == f"{many}\n", "closed, and not one byte to read"
    finally:
        door.close()
        for dial in ends:
            dial.sock.close()


@pytest.fixture
def doctor():
    """The doctor's program of one host, which listens, and the job of this run."""
    job = prepare(Options(hosts="a", via="env NAME={host}", ship_self=False), ["true"])
    probe = HostProbe(job.hosts[0])
    probe.start()
    listening = probe.ask(
        do="listen", key=job.key.hex(), job=job.id, certificate="", iface="", rank=0
    )
    yield probe, job, listening["addresses"]
    probe.end()


def test_another_user_gets_nothing_from_the_doctor(doctor):
    """Not even one that has the name of the run, which is no secret: the answer is a challenge."""
    probe, job, offers = doctor
    target = next(item for item in offers if item["address"] == "127.0.0.1")
    claim = Claim(Purpose.PROBE, job_digest(job.id), 0, 0, 0)
    place = place_of("127.0.0.1", target["port"])
    greeting = Initiator(bytes(32), claim, place=place).greeting.hex()
    old_token = "00" + secrets.token_bytes(15).hex()  # a first byte of 2, of an admission, gets an answer
    with another_user(DIALS) as process:
        def dial(offer, *sent):
            family = socket.AF_INET6 if ":" in offer["address"] else socket.AF_INET
            line = f"{int(family)} {offer['address']} {offer['port']} {' '.join(sent)}"
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        for offer in offers:
            if not offer["address"].startswith("fe80:"):
                assert dial(offer, old_token, b"p".hex()) == dial(offer) == "nothing"
        challenge = bytes.fromhex(dial(target, greeting, secrets.token_hex(32)))
    # The magic, version and status, a nonce, and a proof that holds for this nonce only; no echo, no rank.
    assert challenge.startswith(b"ringcomm") and len(challenge) == 8 + 2 + 2 + 32 + 32
    assert probe.ask(do="probe", targets=[], within_s=1.0) == [], "and the doctor goes on"


# ---- another user holds the same port at the IPv6 twin of an address -----------------------------


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
