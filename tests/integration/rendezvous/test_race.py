"""Measuring wires over real sockets: the numbers, wires that break, and what others may not do."""

from __future__ import annotations

import logging
import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.rendezvous.measuring import BLOCK, LIMIT_BYTES, Echo, Race
from ringcomm.transport.connect import Acceptor, listen
from ringcomm.transport.nics import LOOPBACK, Interface
from ringcomm.transport.reactor import READ, Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from ringcomm.wire.messages import encode
from tests.support.service import free_port, turn_until

KEY, JOB = b"k" * 32, job_digest("job")
CLAIM = Claim(Purpose.PROBE, JOB, generation=3, source=0, target=1)


@pytest.fixture
def mesh(no_leaks):
    """That of rank 1, on two addresses, ready to be probed."""
    loopback = [Interface("lo", address, LOOPBACK, 8) for address in ("127.0.0.1", "127.0.0.2")]
    mesh = LinkSetup(Reactor(), loopback, KEY, JOB, [].append)
    mesh.assign_rank(1, 3)
    yield mesh
    mesh.close()
    mesh.reactor.close()


def wires(mesh):
    return [{**offer, "scope": 0} for offer in mesh.offers()]


def run(mesh, claim, ways):
    results = []
    race = Race(mesh.reactor, KEY, claim, ways, results.append)
    deadline = Deadline(20.0)
    while not results and not deadline.expired():
        mesh.reactor.run_once(1.0)
    race.close()
    (speeds,) = results
    return speeds


def test_every_wire_has_a_speed(mesh):
    speeds = run(mesh, CLAIM, wires(mesh))
    assert len(speeds) == 2
    for speed in speeds:
        assert speed.mb_per_s == min(speed.there_mb_per_s, speed.back_mb_per_s) > 10.0


def test_a_wire_without_a_listener_has_none(mesh):
    gone = {"address": "127.0.0.1", "port": free_port(), "scope": 0}
    first, second = wires(mesh)
    speeds = run(mesh, CLAIM, [first, gone, second])
    assert [speed is None for speed in speeds] == [False, True, False]
    assert run(mesh, CLAIM, [gone]) == [None]


# ---- another end that does not keep to the rules ---------------------------------------------


class Odd:
    """An answering side that does as the test says once the connection is authenticated."""

    def __init__(self, reactor, arrived):
        self.reactor, self.socks = reactor, []
        self.listener = listen("127.0.0.1", 0)
        self.acceptor = Acceptor(reactor, [self.listener], KEY, JOB, self.arrived, lambda *why: None)
        self._then = arrived

    def arrived(self, sock, claim, session):
        self.socks.append(sock)
        self._then(self, sock, session)

    @property
    def wire(self):
        return {"address": "127.0.0.1", "port": self.listener.getsockname()[1], "scope": 0}

    def close(self):
        self.acceptor.close()
        for sock in self.socks:
            sock.close()


def say_nothing(odd, sock, session):
    sock.shutdown(socket.SHUT_WR)


def end_after_the_echo(odd, sock, session):
    sock.send(encode({"type": "echo", "rank": 1}, session))
    sock.shutdown(socket.SHUT_WR)


def report(total, passed_us):
    """When the measurement has begun, report so many bytes after so many microseconds."""

    def arrived(odd, sock, session):
        def asked():
            odd.reactor.forget(sock)
            sock.send(BLOCK.pack(total, passed_us, 0))

        sock.send(encode({"type": "echo", "rank": 1}, session))
        odd.reactor.watch(sock, READ, asked)

    return arrived


RULES = (
    (say_nothing, "it closed the connection"), (end_after_the_echo, "it closed the connection"),
    (report(LIMIT_BYTES + 1, 10), "it has received more than was sent"),
    (report(0, 2 * 10**9), "it has received more than was sent"),
)  # fmt: skip


def test_a_wire_whose_other_end_breaks_the_rules_has_no_speed(mesh, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    good, _ = wires(mesh)
    odd = [Odd(mesh.reactor, behaviour) for behaviour, _ in RULES]
    *broken, speed = run(mesh, CLAIM, [*(item.wire for item in odd), good])
    for item in odd:
        item.close()
    assert broken == [None] * len(odd) and speed.mb_per_s > 0.0
    said = [item.getMessage() for item in caplog.records if "could not be measured" in item.getMessage()]
    assert sorted(said) == sorted(f"a wire to rank 1 could not be measured: {why}" for _, why in RULES)


@pytest.mark.parametrize(
    "head",
    [BLOCK.pack(0, 0, LIMIT_BYTES + 1), BLOCK.pack(LIMIT_BYTES + 1, 0, 0), BLOCK.pack(0, 2 * 10**9, 0)],
)
def test_an_echo_ends_if_the_other_end_breaks_the_rules(reactor, head):
    ended = []
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        Echo(reactor, here, None, 3, ended.append)
        assert there.recv(1000) == encode({"type": "echo", "rank": 3})
        there.sendall(head)
        turn_until(reactor, lambda: ended)
        reactor.forget(here)
