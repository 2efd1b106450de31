"""Probes: which rank answers at an address, and why none does."""

from __future__ import annotations

import re
import socket

import pytest

from ringcomm.rendezvous import links as probing_module
from ringcomm.rendezvous.links import LinkSetup, Probe, Probing, scopes_of
from ringcomm.transport.nics import LOOPBACK, VIRTUAL, WIRED, Interface, machine
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from ringcomm.wire.messages import encode
from tests.support.service import Door, turn_until

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


# ---- a round of probes -----------------------------------------------------------------------

ETH = Interface("eth0", "127.0.0.1", WIRED, 8)


@pytest.fixture
def rounds(no_leaks, monkeypatch):
    """`rounds(limit_s, *offers)`: the report about rank 1, which answers at the address `rounds.here`."""
    monkeypatch.setattr(probing_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(probing_module, "_GRACE_FACTOR", 0.0)
    reactor, made = Reactor(), []
    rank = LinkSetup(reactor, [ETH], KEY, JOB, [].append)
    rank.assign_rank(1, 1)

    def run(limit_s, *offers, interfaces=(ETH,)):
        reported = []
        claim = Claim(Purpose.PROBE, JOB, 1, 0)
        made.append(Probing(reactor, list(interfaces), KEY, claim, None, reported.append))
        made[-1].begin([{"rank": 1, "machine": machine(), "addresses": list(offers)}], limit_s)
        turn_until(reactor, lambda: reported)
        (attempts,) = reported
        return attempts

    (run.here,) = rank.offers()
    yield run
    for item in made:
        item.close()
    rank.close()
    reactor.close()


@pytest.fixture
def silent():
    """An address at which connections are made, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        yield {"address": address, "port": port, "iface": "eth7", "kind": WIRED}


def test_once_every_host_has_answered_the_rest_is_not_waited_for(rounds, silent):
    answered, slow = rounds(60.0, rounds.here, silent)
    assert answered["why"] == "" and answered["local_iface"] == "eth0"
    assert re.fullmatch(r"no answer within \d+\.\d s, while another address had answered", slow["why"])
    assert not slow["too_slow"], "it is not dialled again: there is another way"


@pytest.mark.parametrize("limit_s", [60.0, 1.0])
def test_link_local_addresses_of_interfaces_that_answered_are_waited_for_less(rounds, monkeypatch, limit_s):
    """By the wrong interface of this machine they do not answer, so each start would wait for them."""
    monkeypatch.setattr(probing_module, "_GRACE_S", 60.0)
    monkeypatch.setattr(probing_module, "_LINK_LOCAL_GRACE_S", 0.0)
    scope = socket.if_nametoindex("lo")
    monkeypatch.setattr(probing_module, "scopes_of", lambda address, _: [scope if ":" in address else 0])
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address, port = server.getsockname()[:2]
        iface = rounds.here["iface"] if limit_s == 60.0 else "eth9"
        scoped = {"address": address, "port": port, "iface": iface, "kind": WIRED}
        answered, silent = rounds(limit_s, rounds.here, scoped)
    assert answered["why"] == ""
    text = r"no answer within \d+\.\d s, while another address had answered"
    assert re.fullmatch(text if limit_s == 60.0 else "no answer within 1 s", silent["why"])


def test_an_answer_on_a_virtual_interface_does_not_end_the_wait(rounds, silent):
    """It may lead to a container of another host that has the same address."""
    virtual = {**rounds.here, "kind": VIRTUAL}
    answered, slow = rounds(1.0, virtual, silent)
    assert answered["why"] == "" and answered["kind"] == VIRTUAL
    assert slow["why"] == "no answer within 1 s" and slow["too_slow"]


def test_a_link_local_address_is_dialled_by_every_interface_that_has_a_scope():
    found = [
        Interface("eth0", "fe80::1", WIRED, 64, scope=4), Interface("eth1", "fe80::2", WIRED, 64, scope=2),
        Interface("eth1", "10.0.0.1", WIRED, 8), Interface("eth0", "fe80::3", WIRED, 64, scope=4),
    ]  # fmt: skip
    assert scopes_of("fe80::9", found) == [2, 4]
    assert scopes_of("fd00::9", found) == scopes_of("10.0.0.9", found) == scopes_of("@name", found) == [0]
    assert scopes_of("fe80::9", found[2:3]) == []
