"""Building links while a job starts: what a rank offers, dials and accepts, and what it reports."""

from __future__ import annotations

import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous import links
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.rendezvous.routing import ranges_of
from ringcomm.transport.connect import Dial
from ringcomm.transport.nics import LOOPBACK, WIRED, Interface, machine
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose
from ringcomm.wire.messages import MessageReader
from tests.support.service import JOB, KEY, Door, turn_until

LO = Interface("lo", "127.0.0.1", LOOPBACK, 8)
ETH = Interface("eth0", "127.0.0.1", WIRED, 8)
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


# ---- listening -------------------------------------------------------------------------------


def test_an_address_that_cannot_be_listened_on_is_not_offered(network):
    rank = network.rank(0, LO, Interface("gone0", "192.0.2.1", WIRED, 24))
    (offer,) = rank.setup.offers()
    assert (offer["iface"], offer["address"], offer["kind"]) == ("lo", "127.0.0.1", LOOPBACK)
    assert offer["port"] > 0


# ---- accepting -------------------------------------------------------------------------------


def test_a_peer_that_comes_before_this_rank_has_its_number_is_answered_then(network):
    rank = network.rank(-1)
    sock, session = network.dial(rank)
    network.until(lambda: rank.setup._early)
    rank.setup.assign_rank(1, 3)
    assert network.answers(sock, session, 1) == [echo(1)]
    assert network.linked(rank)[Purpose.DIRECT] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2}, {"generation": 4}, {"target": 0}, {"target": 2}, {"source": 1},
        {"purpose": Purpose.CONTROL}, {"purpose": 99},
    ],
    ids=str,
)  # fmt: skip
def test_others_of_the_same_job_are_sent_away(network, change):
    """They hold the key, and are of an old start, or found an address that two hosts have."""
    rank = network.rank(1)
    sock, _ = network.dial(rank, CLAIM._replace(**change))
    network.until(lambda: _is_closed(sock))
    assert network.linked(rank) == {purpose: [] for purpose in CHANNELS}


def test_a_peer_that_dials_again_has_given_up_the_older_connection(network):
    rank = network.rank(1)
    older, its_session = network.dial(rank)
    newer, session = network.dial(rank)
    assert network.answers(older, its_session, 2) == [echo(1), None]
    assert network.answers(newer, session, 1) == [echo(1)]
    assert network.linked(rank)[Purpose.DIRECT] == [0]
    assert network.socks[-1].getpeername() == newer.getsockname()


def test_all_channels_make_a_linked_rank_which_reports_it(network):
    rank = network.rank(1)
    rank.setup.link(WAITS, Deadline(60.0))
    for purpose in CHANNELS:
        assert not rank.setup.linked and rank.sent == []
        network.dial(rank, CLAIM._replace(purpose=purpose))
        network.until(lambda purpose=purpose: (purpose, 0) in rank.setup._links)
    links = [{"iface": "lo", "local": "127.0.0.1", "peers": ranges_of([0])}]
    assert rank.setup.linked and rank.sent == [{"type": "linked", "links": links}]
    assert network.linked(rank) == {purpose: [0] for purpose in CHANNELS}


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


def test_another_rank_at_the_address_of_the_peer_is_reported(network, refusing):
    one, wrong = network.rank(0), network.rank(2)
    one.setup.link([route(1, refusing, *wrong.setup.offers())], Deadline(60.0))
    network.until(lambda: len(one.sent) == len(CHANNELS))
    tried = "127.0.0.1: connection refused; 127.0.0.1: rank 2 answered there, not rank 1"
    assert one.sent == [{"type": "unlinked", "peer": 1, "reason": f"rank 1 did not answer ({tried})"}] * len(
        CHANNELS
    )


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


def test_once_it_is_closed_it_reports_nothing(network, refusing):
    """The rendezvous would take it for a report about the next view."""
    rank = network.rank(0)
    rank.setup.link([route(1, refusing)], Deadline(0.01))
    rank.setup.close()
    over = Deadline(0.2)
    network.until(over.expired)
    assert rank.sent == []


def test_a_peer_that_offers_no_address_on_the_route_is_reported_at_once(network):
    rank = network.rank(0)
    rank.setup.link([route(1)], Deadline(60.0))
    reason = "rank 1 did not answer (it offered no address on the chosen route)"
    assert rank.sent == [{"type": "unlinked", "peer": 1, "reason": reason}] * len(CHANNELS)


def test_a_link_that_is_made_after_the_start_has_ended_is_closed(network):
    one, door = network.rank(0), network.door()
    address, port = door.address
    one.setup.link([route(1, {"address": address, "port": port})], Deadline(60.0))
    one.setup.close()
    network.until(lambda: len(door.arrived) == len(CHANNELS))
    for sock, _ in door.arrived:
        network.until(lambda sock=sock: _is_closed(sock))
    assert one.sent == []


def _is_closed(sock):
    try:
        return sock.recv(1000) == b""
    except BlockingIOError:
        return False


SCOPES = (
    ("fe80::2", "eth5", 7), ("fe80::2", "eth9", 0), ("127.0.0.1", "eth5", 0), ("@name", "eth5", 0),
)  # fmt: skip


def test_only_link_local_addresses_are_dialled_by_the_scope_of_an_interface(network, monkeypatch):
    dialled = []
    monkeypatch.setattr(links, "Dial", lambda *arguments: dialled.append(arguments))
    rank = network.rank(0)
    rank.setup.interfaces += [ETH, Interface("eth5", "fe80::1", WIRED, 64, scope=7)]
    for address, iface, scope in SCOPES:
        rank.setup.link([route(1, {"address": address, "port": 5000}, iface=iface)], Deadline(60.0))
        assert [(item[1], item[6]) for item in dialled] == [((address, 5000), scope)] * len(CHANNELS)
        dialled.clear()


# ---- probing and measuring -------------------------------------------------------------------


def test_what_leads_to_a_rank_is_reported_and_its_probes_are_closed(network, refusing):
    one, other = network.rank(0, ETH), network.rank(1, ETH)
    offers = [{**refusing, "kind": WIRED}, *other.setup.offers()]
    one.setup.probe([{"rank": 1, "addresses": offers, "machine": machine()}])
    network.until(lambda: one.sent)
    (report,) = one.sent
    assert report["type"] == "probed"
    assert [item["why"] for item in report["attempts"]] == ["connection refused", ""]
    assert [item["local_iface"] for item in report["attempts"]] == ["?", "eth0"]
    network.until(lambda: not other.setup._echoes)


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
