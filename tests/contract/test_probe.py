"""Probes: which rank answers at an address, and why none does."""

from __future__ import annotations

import socket

import pytest

from ringcomm.rendezvous.probe import Probe
from ringcomm.rendezvous.probing import Probing
from ringcomm.transport.kinds import LOOPBACK, WIRED
from ringcomm.transport.nics import Interface, machine
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from ringcomm.wire.messages import encode
from tests.contract.service import Door, eventually

KEY, JOB = b"k" * 32, job_digest("job")
LO = [Interface("lo", "127.0.0.1", LOOPBACK, 8)]


@pytest.fixture
def probe(no_leaks):
    """`probe(address, port)`: a probe of rank 1, and how often it has settled."""
    reactor = Reactor()
    made = []

    def start(address, port, interfaces=LO):
        settled = []
        offer = {"address": address, "port": port, "iface": "eth7", "kind": LOOPBACK}
        claim = Claim(Purpose.DIRECT, JOB, 1, 0, 1)
        made.append(Probe(reactor, KEY, claim, offer, 0, interfaces, lambda _: settled.append(1)))
        return made[-1], settled

    start.reactor = reactor
    yield start
    for item in made:
        item.close()
    reactor.close()


def test_an_address_where_nothing_listens(probe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        made, settled = probe(*taken.getsockname())

        def turn():
            probe.reactor.run_once(0.01)
            return settled

        assert eventually(turn)
    attempt = made.attempt()
    assert attempt.why == made.why == "connection refused"
    assert (attempt.source, attempt.target, attempt.local_iface) == (0, 1, "?")


def test_the_first_reason_stays(probe):
    with socket.create_server(("127.0.0.1", 0)) as server:
        made, settled = probe(*server.getsockname())
        made.give_up("it takes too long")
        made.give_up("something else")
    assert made.attempt().why == "it takes too long"
    assert settled == [1]


def test_a_rank_that_does_not_say_which_it_is(probe):
    """The handshake alone does not show that it is the right one of the job's ranks."""
    door = Door(probe.reactor)
    made, settled = probe(*door.address)
    door.turn_until(lambda: door.arrived)
    assert made.why is None and not settled
    door.arrived[0][0].close()
    door.turn_until(lambda: settled)
    assert made.attempt().why == "it closed the connection"
    door.close()


@pytest.mark.parametrize(
    ("rank", "interfaces", "why"),
    [
        (1, LO, ""),
        (2, LO, "rank 2 answered there, not rank 1"),
        (1, [LO[0]._replace(address="10.0.0.1")], "it goes out by 127.0.0.1, which --iface excludes"),
    ],
)
def test_what_answers_counts(probe, rank, interfaces, why):
    door, found = Door(probe.reactor), []
    door.acceptor.arrived = lambda sock, claim, session: found.append((sock, session))
    made, settled = probe(*door.address, interfaces)
    door.turn_until(lambda: found)
    ((sock, session),) = found
    sock.sendall(encode({"type": "echo", "rank": rank}, session))
    door.turn_until(lambda: settled)
    attempt = made.attempt()
    assert attempt.why == why
    if not why:
        assert (attempt.local, attempt.local_iface, attempt.remote_iface) == ("127.0.0.1", "lo", "eth7")
    sock.close()
    door.close()


def test_a_start_that_is_given_up_closes_its_probes(no_leaks):
    reactor, reported = Reactor(), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        offer = {"address": address, "port": port, "iface": "eth7", "kind": WIRED}
        probing = Probing(reactor, LO, KEY, Claim(Purpose.PROBE, JOB, 1, 0), None, reported.append)
        probing.begin([{"rank": 1, "machine": machine(), "addresses": [offer]}], 30.0)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(20.0)
            probing.close()
            while peer.recv(4096):  # until its end: the greeting, if it has been sent, and nothing more
                pass
    assert not reported
    reactor.close()
