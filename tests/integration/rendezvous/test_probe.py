"""Probes: which rank answers at an address, and why none does."""

from __future__ import annotations

import re
import socket

import pytest

from ringcomm.rendezvous import links as probing_module
from ringcomm.rendezvous.links import LinkSetup, Probing, scopes_of
from ringcomm.transport.nics import VIRTUAL, WIRED, Interface, machine
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from tests.support.service import turn_until

KEY, JOB = b"k" * 32, job_digest("job")
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
        targets = [{"rank": run.asked, "machine": machine(), "addresses": list(offers)}]
        arguments = targets, limit_s, reported.append, run.reached_by
        made.append(Probing(reactor, list(interfaces), KEY, claim, None, *arguments))
        turn_until(reactor, lambda: reported)
        (attempts,) = reported
        return attempts

    (run.here,), run.asked, run.reached_by = rank.offers(), 1, []
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


@pytest.mark.parametrize(
    ("asked", "interfaces", "why"),
    [
        (2, [ETH], "rank 1 answered there, not rank 2"),
        (1, [ETH._replace(address="10.0.0.1")], "it goes out by 127.0.0.1, which --iface excludes"),
    ],
)
def test_only_the_right_rank_over_an_allowed_interface_counts(rounds, asked, interfaces, why):
    rounds.asked = asked
    (attempt,) = rounds(60.0, rounds.here, interfaces=interfaces)
    assert attempt["why"] == why


def test_once_every_host_has_answered_the_rest_is_not_waited_for(rounds, silent):
    answered, slow = rounds(60.0, rounds.here, silent)
    assert answered["why"] == "" and answered["local_iface"] == "eth0"
    assert re.fullmatch(r"no answer within \d+\.\d s, while another address had answered", slow["why"])
    assert not slow["too_slow"], "it is not dialled again: there is another way"


def test_link_local_addresses_are_waited_for_less(rounds, monkeypatch):
    """By the wrong interface of this machine they do not answer, so each start would wait for them."""
    monkeypatch.setattr(probing_module, "_GRACE_S", 60.0)
    monkeypatch.setattr(probing_module, "_LINK_LOCAL_GRACE_S", 0.0)
    scope = socket.if_nametoindex("lo")
    monkeypatch.setattr(probing_module, "scopes_of", lambda address, _: [scope if ":" in address else 0])
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address, port = server.getsockname()[:2]
        scoped = {"address": address, "port": port, "iface": rounds.here["iface"], "kind": WIRED}
        answered, silent = rounds(60.0, rounds.here, scoped)
    assert answered["why"] == ""
    assert re.fullmatch(r"no answer within \d+\.\d s, while another address had answered", silent["why"])


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


def test_a_rank_that_has_come_by_itself_is_not_waited_for(rounds, silent):
    """A firewall may let through only one direction."""
    rounds.reached_by = [1]
    (slow,) = rounds(60.0, silent)
    assert re.fullmatch(r"no answer within \d+\.\d s, while another address had answered", slow["why"])
