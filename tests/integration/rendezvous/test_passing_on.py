"""Passing the list of ranks on to those that have dialled this one."""

from __future__ import annotations

import socket
import struct

import pytest

from ringcomm.rendezvous.relay import Relay
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader
from ringcomm.wire.signing import session_of
from tests.integration.rendezvous.member_lists import WAYS, echo, listing
from tests.support.service import turn_until


class Branch:
    """A rank that has dialled this one: its end, this rank's end, and what it has received."""

    def __init__(self, tcp=False):
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.there = socket.create_connection(server.getsockname())
                self.here, _ = server.accept()
        else:
            self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.there.setblocking(False)
        self.session = session_of(bytes(32), False)
        self._reader = MessageReader(MAX_MESSAGE_BYTES, session_of(bytes(32), True))
        self.received = []

    def read(self):
        """Take what has arrived; how many messages there are by now."""
        try:
            self.received += self._reader.feed(self.there.recv(1 << 16))
        except BlockingIOError:
            pass
        return len(self.received)


@pytest.fixture
def branch():
    """`branch()`: makes the two ends of a connection."""
    made = []

    def make(**options):
        made.append(Branch(**options))
        return made[-1]

    yield make
    for item in made:
        item.here.close()
        item.there.close()


@pytest.fixture
def relay(reactor):
    relay = Relay(reactor, 1)
    yield relay
    relay.close()


def test_all_get_the_list_and_those_of_this_host_the_ways(reactor, relay, branch):
    """Whether they have dialled before it was there or not."""
    mate, other, late_mate, late = (branch() for _ in range(4))
    relay.accept(mate.here, mate.session, 2)
    relay.accept(other.here, other.session, 7)
    relay.pass_on_list(listing(4, 4), {1, 2, 3})
    relay.pass_on_ways(WAYS)
    relay.accept(late_mate.here, late_mate.session, 3)
    relay.accept(late.here, late.session, 6)
    wanted = {mate: 3, other: 2, late_mate: 3, late: 2}
    turn_until(reactor, lambda: [item.read() for item in wanted] == list(wanted.values()))
    assert mate.received == late_mate.received == [echo(1), listing(4, 4), WAYS]
    assert other.received == late.received == [echo(1), listing(4, 4)]


def test_a_list_that_is_longer_than_buffers_follows_in_pieces(reactor, relay, branch):
    slow, quick = branch(), branch()
    for item in (slow, quick):
        relay.accept(item.here, item.session, 2)
    long = listing(*[100] * 100)
    relay.pass_on_list(long, ())
    turn_until(reactor, lambda: quick.read() == 2)
    assert quick.received[1] == long
    for _ in range(100):
        slow.read()
    assert slow.received == [echo(1)], "buffers hold only a part of the list, and nothing more is sent now"
    turn_until(reactor, lambda: slow.read() == 2)
    assert slow.received == [echo(1), long]


def test_a_rank_that_has_gone_needs_nothing_more(reactor, relay, branch):
    """One has ended, one was reset, one is gone when something is sent, one when it would be answered."""
    ended, reset, late, early = branch(), branch(tcp=True), branch(), branch()
    for item in (ended, reset, late):
        relay.accept(item.here, item.session, 2)
    turn_until(reactor, lambda: ended.read() == 1)
    ended.there.close()
    reset.there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.there.close()
    turn_until(reactor, lambda: ended.here.fileno() == reset.here.fileno() == -1)
    late.there.close()
    relay.pass_on_list(listing(4), {2})
    assert late.here.fileno() == -1
    early.there.close()
    relay.accept(early.here, early.session, 3)
    assert early.here.fileno() == -1
    relay.pass_on_ways(WAYS)  # to none of them


def test_a_rank_that_sends_something_is_none_that_waits_for_the_list(reactor, relay, branch):
    talking = branch()
    relay.accept(talking.here, talking.session, 2)
    talking.there.send(b"?")
    turn_until(reactor, lambda: talking.here.fileno() == -1)
