"""Links while a job starts: what is offered, dialled and accepted; probes; and measured wires."""

from __future__ import annotations

import logging
import re
import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous import links as probing_module
from ringcomm.rendezvous.links import LinkSetup, Probing, scopes_of
from ringcomm.rendezvous.measuring import BLOCK, LIMIT_BYTES, Echo, Race
from ringcomm.transport.connect import Acceptor, Dial, listen
from ringcomm.transport.nics import LOOPBACK, VIRTUAL, WIRED, Interface, machine
from ringcomm.transport.reactor import READ, Reactor
from ringcomm.wire.auth import Claim, Purpose
from ringcomm.wire.messages import MessageReader, encode
from tests.support.service import JOB, KEY, Door, free_port, turn_until

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


# ---- probes: which rank answers at an address, and why none does ---------------------------------


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


# ---- measuring wires over real sockets -----------------------------------------------------------


PROBES = Claim(Purpose.PROBE, JOB, generation=3, source=0, target=1)


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
    speeds = run(mesh, PROBES, wires(mesh))
    assert len(speeds) == 2
    for speed in speeds:
        assert speed.mb_per_s == min(speed.there_mb_per_s, speed.back_mb_per_s) > 10.0


def test_a_wire_without_a_listener_has_none(mesh):
    gone = {"address": "127.0.0.1", "port": free_port(), "scope": 0}
    first, second = wires(mesh)
    speeds = run(mesh, PROBES, [first, gone, second])
    assert [speed is None for speed in speeds] == [False, True, False]
    assert run(mesh, PROBES, [gone]) == [None]


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
    *broken, speed = run(mesh, PROBES, [*(item.wire for item in odd), good])
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
