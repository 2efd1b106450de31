"""Measuring wires over real sockets: the numbers, wires that break, and what others may not do."""

from __future__ import annotations

import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous.echo import BLOCK, REQUEST, Echo
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.rendezvous.meter import BURST_BYTES, LIMIT_BYTES
from ringcomm.rendezvous.race import Race
from ringcomm.transport.kinds import LOOPBACK
from ringcomm.transport.nics import Interface
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from ringcomm.wire.signing import session_of
from tests.contract.service import eventually

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
    assert len(speeds) == 2 and all(speed > 10.0 for speed in speeds)


def test_a_wire_that_nobody_listens_at_has_none(mesh):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = {"address": "127.0.0.1", "port": port, "scope": 0}
    first, second = wires(mesh)
    speeds = run(mesh, CLAIM, [first, gone, second])
    assert [speed is None for speed in speeds] == [False, True, False]
    assert run(mesh, CLAIM, [gone]) == [None]


def test_another_rank_there_is_no_wire(mesh):
    assert run(mesh, CLAIM._replace(target=2), wires(mesh)) == [None, None]


@pytest.fixture
def asked(no_leaks):
    """An answering side, and the socket of the side that asks."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.settimeout(5.0)
    reactor, ended = Reactor(), []
    echo = Echo(reactor, here, session_of(bytes(32), False), 1, ended.append)
    assert b"echo" in there.recv(1000)
    yield reactor, there, ended
    reactor.forget(echo.sock)
    reactor.close()
    here.close()
    there.close()


def test_the_answer_says_what_has_arrived(asked):
    reactor, there, ended = asked
    there.sendall(REQUEST.pack(40_000) + bytes(30_000))
    there.settimeout(0.0)
    heads, data = [], bytearray()

    def read():
        reactor.run_once(0.0)
        try:
            data.extend(there.recv(1 << 20))
        except BlockingIOError:
            pass
        while len(data) >= BLOCK.size and len(data) >= BLOCK.size + BLOCK.unpack_from(data)[-1]:
            total, passed_us, *_, size = BLOCK.unpack_from(data)
            heads.append((total, passed_us, size))
            del data[: BLOCK.size + size]
        return heads and heads[-1][0] == 30_000 and sum(head[2] for head in heads) == 40_000

    assert eventually(read)
    assert heads == sorted(heads, key=lambda head: head[:2])
    there.send(bytes(5_000))
    assert eventually(lambda: read() or heads[-1] == (35_000, heads[-1][1], 0))
    assert not ended


@pytest.mark.parametrize(
    "data",
    [
        REQUEST.pack(0),
        REQUEST.pack(LIMIT_BYTES + 1),
        REQUEST.pack(1000) + bytes(1001),
    ],
)
def test_the_answering_side_has_limits(asked, data):
    reactor, there, ended = asked
    there.sendall(data)
    assert eventually(lambda: reactor.run_once(0.01) or bool(ended))


def test_a_burst_of_a_mebibyte_leaves_something_to_measure():
    assert BURST_BYTES > 1024 * 1024
    assert LIMIT_BYTES > 2 * BURST_BYTES
