"""Building links while a job starts: what a rank offers, dials and accepts, and what it reports."""

from __future__ import annotations

import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.transport.connect import Dial
from ringcomm.transport.nics import LOOPBACK, Interface
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose
from ringcomm.wire.messages import MessageReader
from tests.support.service import JOB, KEY, Door, turn_until

LO = Interface("lo", "127.0.0.1", LOOPBACK, 8)
CLAIM = Claim(Purpose.DIRECT, JOB, generation=3, source=0, target=1)
CHANNELS = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)
WAITS = [{"peer": 0, "dial": False, "addresses": [], "iface": ""}]


class Rank:
    """The links of one rank, and what it has reported to the rendezvous. Number -1: it has none yet."""

    def __init__(self, reactor, number, interfaces):
        self.sent = []
        self.setup = LinkSetup(reactor, interfaces, KEY, JOB, self.sent.append)
        if number >= 0:
            self.setup.assign_rank(number, 3)

    @property
    def address(self):
        offer = self.setup.offers()[0]
        return offer["address"], offer["port"]


class Network:
    """Ranks that one reactor drives."""

    def __init__(self):
        self.reactor = Reactor()
        self.ranks, self.socks, self.doors = [], [], []

    def rank(self, number, *interfaces):
        self.ranks.append(Rank(self.reactor, number, interfaces or [LO]))
        return self.ranks[-1]

    def door(self):
        self.doors.append(Door(self.reactor))
        return self.doors[-1]

    def until(self, condition):
        turn_until(self.reactor, condition)

    def dial(self, rank, claim=CLAIM):
        """A connection to this rank after the handshake, and its session."""
        ends = []
        Dial(self.reactor, rank.address, KEY, claim, ends.append, 30.0)
        self.until(lambda: ends)
        assert ends[0].sock is not None, ends[0].reason
        self.socks.append(ends[0].sock)
        return ends[0].sock, ends[0].session

    def next(self, sock, reader):
        """The next message from there; None: the connection is closed."""
        found = []

        def read():
            try:
                data = sock.recv(4096)
            except BlockingIOError:
                return False
            found.extend(reader.feed(data) if data else [None])
            return bool(found)

        self.until(read)
        (message,) = found
        return message

    def linked(self, rank):
        """The peers of its finished links, by purpose."""
        found = rank.setup.take_links()
        self.socks += [sock for links in found.values() for sock, _ in links.values()]
        return {purpose: sorted(links) for purpose, links in found.items()}

    def answers(self, sock, session, count):
        """The first messages from there."""
        reader = MessageReader(4096, session)
        return [self.next(sock, reader) for _ in range(count)]

    def close(self):
        for rank in self.ranks:
            rank.setup.close()
        for door in self.doors:
            door.close()
        for sock in self.socks:
            sock.close()
        self.reactor.close()


@pytest.fixture
def network(no_leaks):
    network = Network()
    yield network
    network.close()


def echo(rank):
    return {"type": "echo", "rank": rank}


def route(peer, *addresses, dial=True, iface="lo"):
    return {"peer": peer, "dial": dial, "addresses": list(addresses), "iface": iface}


# ---- accepting -------------------------------------------------------------------------------


def test_a_peer_that_comes_before_this_rank_has_its_number_is_answered_then(network):
    rank = network.rank(-1)
    sock, session = network.dial(rank)
    network.until(lambda: rank.setup._early)
    rank.setup.assign_rank(1, 3)
    assert network.answers(sock, session, 1) == [echo(1)]
    assert network.linked(rank)[Purpose.DIRECT] == [0]


def test_peers_that_do_not_come_in_time_are_reported(network):
    rank = network.rank(1)
    rank.setup.link([*WAITS, route(4, dial=False)], Deadline(0.0))
    network.until(lambda: rank.sent)
    assert rank.sent == [{"type": "unlinked", "peer": 0, "reason": "no link to rank 0, rank 4 within 10 s"}]


# ---- dialling --------------------------------------------------------------------------------


def test_the_addresses_of_a_route_are_dialled_until_one_leads_to_the_peer(network, refusing):
    one, other = network.rank(0), network.rank(1)
    one.setup.link([route(1, refusing, *other.setup.offers())], Deadline(60.0))
    other.setup.link(WAITS, Deadline(60.0))
    network.until(lambda: one.sent and other.sent)
    assert [one.sent[0]["type"], other.sent[0]["type"]] == ["linked", "linked"]
    assert network.linked(one) == {purpose: [1] for purpose in CHANNELS}
    assert network.linked(other) == {purpose: [0] for purpose in CHANNELS}
    ends = [(sock.getsockname(), sock.getpeername()) for sock in network.socks]
    assert sorted(ends[:3]) == sorted((far, near) for near, far in ends[3:])


@pytest.mark.parametrize("words, why", [(b"", "it closed the connection"), (b"\xff" * 4, "at most 4096")])
def test_a_peer_that_does_not_say_which_rank_it_is_gets_no_link(network, words, why):
    one, door = network.rank(0), network.door()
    address, port = door.address
    offer = {"address": address, "port": port, "iface": "lo", "kind": LOOPBACK}
    one.setup.link([route(1, offer)], Deadline(60.0))
    network.until(lambda: len(door.arrived) == len(CHANNELS))
    for sock, _ in door.arrived:
        sock.send(words)
        sock.shutdown(socket.SHUT_WR)
    network.until(lambda: len(one.sent) == len(CHANNELS))
    assert {item["type"] for item in one.sent} == {"unlinked"}
    assert all("rank 1 did not answer (127.0.0.1: " in item["reason"] for item in one.sent)
    assert all(why in item["reason"] for item in one.sent)


# ---- probing and measuring -------------------------------------------------------------------


def test_wires_are_measured_host_by_host_and_those_that_break_are_left_out(network, refusing):
    one, other = network.rank(0), network.rank(1)
    wires = [*other.setup.offers(), refusing]
    one.setup.measure([{"rank": 1, "wires": wires}, {"rank": 5, "wires": [refusing]}])
    network.until(lambda: one.sent)
    (report,) = one.sent
    assert report["type"] == "measured"
    (speed,) = report["speeds"]
    assert (speed["rank"], speed["address"], speed["iface"]) == (1, "127.0.0.1", "lo")
    assert speed["mb_per_s"] > 0.0
