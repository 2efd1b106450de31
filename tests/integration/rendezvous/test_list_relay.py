"""Getting the list of ranks from another rank: how it is dialled, and how the start goes on with it."""

from __future__ import annotations

import socket

import pytest

from ringcomm.errors import ProtocolError, StartupError
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.rendezvous.member_list import digest_of
from ringcomm.rendezvous.relay import Source
from ringcomm.rendezvous.relayed_start import RelayedStart
from ringcomm.transport.kinds import LOCAL, LOOPBACK, WIRED
from ringcomm.transport.nics import Interface
from ringcomm.wire.auth import Claim, Purpose
from ringcomm.wire.messages import encode
from tests.integration.rendezvous.member_lists import HERE, WAYS, echo, listing
from tests.support.service import JOB, KEY, Door, turn_until

LO = Interface("lo", "127.0.0.1", LOOPBACK, 8)
CLAIM = Claim(Purpose.MEMBERS, JOB, generation=0, source=4, target=1)


class Far:
    """A rank that can be dialled; it says what the test has it say.

    Attributes:
        came: the connections that have come to it, with their sessions.
    """

    def __init__(self, reactor):
        self.door, self.came = Door(reactor), []
        self.door.acceptor.arrived = lambda sock, claim, session: self.came.append((sock, session))

    def offer(self, kind=LOOPBACK):
        address, port = self.door.address
        return {"address": address, "port": port, "iface": "lo", "kind": kind}

    def say(self, *messages):
        sock, session = self.came[0]
        sock.sendall(b"".join(encode(message, session) for message in messages))

    def is_left(self):
        """Whether the other end has closed its connection."""
        try:
            return self.came[0][0].recv(100) == b""
        except BlockingIOError:
            return False

    def close(self):
        self.door.close()
        for sock, _ in self.came:
            sock.close()


@pytest.fixture
def far(reactor):
    """`far()`: makes a rank that can be dialled."""
    made = []

    def make():
        made.append(Far(reactor))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def source(reactor):
    """`source(*offers)`: dials rank 1 at these addresses; it has `received` and `ended`."""
    made = []

    def make(*offers, on=HERE):
        received, ended = [], []
        target = {"rank": 1, "machine": on, "addresses": list(offers)}
        item = Source(reactor, [LO], KEY, CLAIM, target, None, 30.0, received.append, ended.append)
        item.received, item.ended = received, ended
        made.append(item)
        return item

    yield make
    for item in made:
        item.close()


# ---- the rank that the list comes from -------------------------------------------------------


def test_the_first_address_that_leads_there_is_used_and_the_others_are_left(reactor, far, source, refusing):
    """One refuses, at one another rank answers, two lead to the right one."""
    wrong, first, second = far(), far(), far()
    found = source(refusing, wrong.offer(), first.offer(), second.offer())
    turn_until(reactor, lambda: wrong.came and first.came and second.came)
    wrong.say(echo(2))
    turn_until(reactor, wrong.is_left)
    first.say(echo(1), listing(3))
    turn_until(reactor, lambda: found.received)
    turn_until(reactor, second.is_left)
    first.say(WAYS)
    turn_until(reactor, lambda: len(found.received) == 2)
    assert [item["type"] for item in found.received] == ["members", "ways"]
    assert found.ended == [] and not first.is_left()


def test_where_no_address_leads_there_every_reason_is_given_once(reactor, far, source, refusing):
    wrong = far()
    found = source(refusing, wrong.offer())
    turn_until(reactor, lambda: wrong.came)
    wrong.say(echo(2))
    turn_until(reactor, lambda: found.ended)
    assert found.ended == ["127.0.0.1: connection refused; 127.0.0.1: rank 2 answered there, not rank 1"]


def test_a_rank_that_ends_after_it_was_chosen(reactor, far, source):
    there = far()
    found = source(there.offer())
    turn_until(reactor, lambda: there.came)
    there.say(echo(1))
    there.came[0][0].shutdown(socket.SHUT_WR)
    turn_until(reactor, lambda: found.ended)
    assert found.ended == ["it closed the connection"] and found.received == []


def test_what_another_machine_offers_only_to_itself_is_not_dialled(reactor, source):
    offers = [
        {"address": "127.0.0.1", "port": 5000, "iface": "docker0", "kind": WIRED},  # an own one here
        {"address": "127.9.9.9", "port": 5000, "iface": "lo", "kind": LOOPBACK},
        {"address": "@name", "port": 0, "iface": "unix", "kind": LOCAL},
    ]
    found = source(*offers, on="another")
    turn_until(reactor, lambda: found.ended)
    assert found.ended == ["it offers no address that can be dialled from here"]


def test_after_it_is_closed_nothing_more_is_taken(reactor, far, source):
    """Two messages have arrived together; the first has ended the need for more."""
    there = far()
    found = source(there.offer())
    turn_until(reactor, lambda: there.came)

    def take(message):
        found.received.append(message["type"])
        found.close()

    found._received = take
    there.say(echo(1), listing(3), WAYS)
    turn_until(reactor, there.is_left)
    assert found.received == ["members"] and found.ended == []


def test_what_fails_while_the_list_is_taken_is_this_ranks_error(reactor, far, source):
    """Such as a lack of descriptors: the rank that has passed the list on did nothing wrong."""
    there = far()
    found = source(there.offer())
    turn_until(reactor, lambda: there.came)

    def fail(message):
        found.close()
        raise OSError("Too many open files")

    found._received = fail
    there.say(echo(1), listing(3))
    with pytest.raises(StartupError, match=r"cannot connect to the others: Too many open files\."):
        turn_until(reactor, lambda: False)
    assert found.ended == []


# ---- the start of a rank that gets the list from another -------------------------------------


class Start:
    """The start of one rank: what it has sent to the rendezvous, the ranks it was named, and its routes."""

    def __init__(self, reactor, rank, wanted, sources=(), shared=False):
        self.sent, self.named, self.routes = [], [], []
        self.setup = LinkSetup(reactor, [LO], KEY, JOB, self.sent.append)
        assignment = {
            "rank": rank, "generation": 0, "digest": digest_of(wanted), "shared": shared,
            "sources": list(sources),
        }  # fmt: skip
        self.relayed = RelayedStart(
            self.setup, assignment, self.sent.append, self.named.append, self.routes.append
        )


@pytest.fixture
def start(reactor):
    made = []

    def make(*arguments, **options):
        made.append(Start(reactor, *arguments, **options))
        return made[-1]

    yield make
    for item in made:
        item.setup.close()


def from_rank(number, *offers, on=HERE):
    return {"rank": number, "machine": on, "addresses": list(offers)}


def test_a_rank_alone_on_the_only_host_has_nothing_to_dial(start):
    item = start(0, listing(2))
    item.relayed.take_list(listing(2))
    assert item.named == [listing(2)["members"]] and item.sent == []
    item.relayed.take_list(listing(2))
    assert len(item.named) == 1, "the list may come twice"
    item.relayed.take_ways(WAYS)
    ((route,),) = item.routes
    assert route["peer"] == 1


def test_a_list_without_this_rank_is_refused(start):
    item = start(5, listing(2))
    with pytest.raises(ProtocolError, match="does not contain rank 5"):
        item.relayed.take_list(listing(2))


def test_ways_before_the_list_are_refused(start):
    item = start(0, listing(2))
    with pytest.raises(ProtocolError, match="before the list of ranks"):
        item.relayed.take_ways(WAYS)


@pytest.mark.parametrize("message", [{"type": "ping"}, WAYS], ids=["ping", "ways"])
def test_where_another_message_comes_first_the_rendezvous_is_asked_for_the_list(reactor, far, start, message):
    there, wanted = far(), listing(1, 1)
    item = start(1, wanted, [from_rank(0, there.offer())])
    turn_until(reactor, lambda: there.came)
    there.say(echo(0), message)
    turn_until(reactor, lambda: item.sent)
    kind = message["type"]
    reason = f"rank 0, which passes on the list of ranks, did not: it may not send '{kind}'"
    assert item.sent == [{"type": "fetch", "reason": reason}]
    item.relayed.take_list(wanted)
    assert item.named == [wanted["members"]]


def test_the_first_rank_of_a_host_needs_only_the_list_of_the_rank_that_passes_it_on(reactor, far, start):
    there, wanted = far(), listing(1, 1)
    item = start(1, wanted, [from_rank(0, there.offer())])
    turn_until(reactor, lambda: there.came)
    there.say(echo(0), wanted)
    turn_until(reactor, there.is_left)
    assert item.named == [wanted["members"]]


def test_inside_a_host_the_rank_that_passes_nothing_on_is_reported_when_the_list_comes(
    reactor, start, refusing
):
    wanted = listing(2)
    item = start(1, wanted, [from_rank(0, refusing)])
    turn_until(reactor, lambda: item.sent)
    item.relayed.take_list(wanted)
    fetch, unlinked = item.sent
    why = "rank 0, which passes on the list of ranks, did not: 127.0.0.1: connection refused"
    assert fetch == {"type": "fetch", "reason": why}
    assert unlinked == {"type": "unlinked", "peer": 0, "reason": why}


def test_inside_a_host_the_ways_come_from_the_rank_that_has_passed_on_the_list(reactor, far, start):
    there, wanted = far(), listing(2)
    item = start(1, wanted, [from_rank(0, there.offer())])
    turn_until(reactor, lambda: there.came)
    there.say(echo(0), wanted, WAYS)
    turn_until(reactor, lambda: item.routes)
    assert item.sent == [] and item.named == [wanted["members"]]
    assert [route["peer"] for route in item.routes[0]] == [0]
    turn_until(reactor, there.is_left)
