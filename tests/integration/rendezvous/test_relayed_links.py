"""Links that the rendezvous relays: between ranks without a route, and what cannot be done with the relay."""

from __future__ import annotations

import builtins
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.errors import LinkLostError, ProtocolError, RingcommError, StartupError
from ringcomm.job.context import Context
from ringcomm.rendezvous import server
from ringcomm.rendezvous.server import PIECE_BYTES, Relay, Splice
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Admission, Claim, Purpose
from tests.support.service import Service, eventually, sum_of_ranks, together, turn_until

LINK = Claim(Purpose.DIRECT, b"", 1, 0, 1)


@pytest.fixture
def service(no_leaks):
    """Two hosts that can reach the rendezvous alone: over the loopback nothing is probed."""
    made = Service(2, encrypt=True, hosts=(1, 1))
    yield made
    made.server.stop()


def test_ranks_without_a_route_work_over_the_relay(service):
    with ExitStack() as stack:
        contexts = service.start_all(stack)
        assert together(contexts, sum_of_ranks) == [1.0, 1.0]
        with socket.create_connection(service.endpoints[0], 10.0) as sock:
            sock.sendall(Admission.of(service.key, passage=LINK))
            assert sock.recv(1) == b"", "when all links are made there is nothing to ask for"
        assert together(contexts, sum_of_ranks) == [1.0, 1.0]
    relayed = f"relayed over {socket.gethostname()}"
    assert f"host0 and host1 cannot reach each other: {relayed}" in service.texts("warning")
    (table,) = service.texts("started")
    assert table.endswith(relayed)
    assert eventually(lambda: "over 3 connections between ranks" in " ".join(service.texts("log")))


def test_groups_meet_at_the_rendezvous_of_the_job_and_are_relayed_too(service):
    """As process groups of torch.distributed do: each is a job beside this one, with ranks of its own."""
    wrong = ["one", 3, 5.0], ["one", 1, 5.0], ["one", True, 5.0], ["one", 2], ["one", 2, "5"], {}, None
    with ExitStack() as stack:
        contexts = service.start_all(stack)
        groups = [ExitStack() for _ in range(2)]
        for name in ("one", "two"):

            def start(rank, name=name):
                group = {"job": name, "within": service.job, "slot": None, "rank": 1 - rank}
                member = replace(service.membership(rank), **group)
                return groups[rank].enter_context(Context.start(member, service.settings))

            with ThreadPoolExecutor(2) as pool:
                ours = list(pool.map(start, range(2)))
            assert [context.rank for context in ours] == [1, 0]
            assert together(ours, sum_of_ranks) == together(contexts, sum_of_ranks) == [1.0, 1.0]
        for terms in wrong:
            with pytest.raises(ProtocolError):
                service.server._group(terms)
        for group in groups:
            group.close()
        assert eventually(lambda: not service.server._groups)
        assert together(contexts, sum_of_ranks) == [1.0, 1.0]
    assert not service.texts("failed") and not service.texts("lost")


def test_a_job_that_does_not_encrypt_is_not_relayed(no_leaks):
    service = Service(2, hosts=(1, 1))

    def start(rank):
        with pytest.raises(StartupError, match="host0 and host1 cannot reach each other") as caught:
            service.start(rank)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert all("(--encrypt)" in text for text in pool.map(start, range(2)))
    service.server.stop()


TRICKS = {
    "flip": lambda data: data[:-1] + bytes([data[-1] ^ 1]), "repeat": lambda data: data + data,
    "leave out": lambda data: data[1:],
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("trick", TRICKS)
def test_bytes_that_the_relay_changes_end_the_link(service, monkeypatch, trick):
    """It sees ciphertext only, of ranks that have proven themselves to each other."""
    change = TRICKS[trick]

    def changed(data):
        return builtins.memoryview(change(data) if len(data) > 10_000 else data)

    def fail(context):
        try:
            return context.allreduce(np.ones(100_000), op=1)
        except RingcommError as problem:
            return problem

    with ExitStack() as stack:
        contexts = service.start_all(stack)
        monkeypatch.setattr(server, "memoryview", changed, raising=False)
        assert {type(outcome) for outcome in together(contexts, fail)} == {LinkLostError}


def pair():
    near, far = socket.socketpair()
    near.setblocking(False)
    return near, far


def test_an_end_that_does_not_read_stops_the_other_and_the_end_of_one_reaches_the_other():
    reactor, ended = Reactor(), []
    (one, left), (other, right) = pair(), pair()
    splice = Splice(reactor, one, other, lambda: ended.append(True))
    data = b"x" * 5_000_000
    left.setblocking(False)
    sent = 0
    for _ in range(1000):
        try:
            sent += left.send(data[sent:])
        except BlockingIOError:
            pass
        reactor.run_once(0.0)
    assert sent < len(data) and max(len(end.held) for end in splice._ends) <= PIECE_BYTES
    right.setblocking(False)
    got = 0
    while got < sent:
        reactor.run_once(0.01)
        try:
            got += len(right.recv(1 << 20))
        except BlockingIOError:
            pass
    left.shutdown(socket.SHUT_WR)
    right.sendall(b"last words")
    turn_until(reactor, lambda: not splice._ends[0].sends)
    right.setblocking(True)
    assert right.recv(1) == b"" and not ended
    right.close()
    turn_until(reactor, lambda: ended)
    left.setblocking(True)
    assert left.recv(100) == b"last words" and left.recv(1) == b""
    assert splice.bytes == sent + len(b"last words")
    left.close()
    reactor.close()


class Street:
    """A relay, and connections to it."""

    def __init__(self, stack):
        self.stack, self.reactor, self.lines = stack, Reactor(), []
        self.relay = Relay(self.reactor, lambda claim: claim.target != 9, self.lines.append)
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.callback(self.reactor.close)
        stack.callback(self.relay.close)

    def ask(self, claim):
        sock = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        sock.settimeout(10.0)
        accepted, _ = self.listener.accept()
        accepted.setblocking(False)
        self.relay.take(accepted, claim)
        return sock


def test_each_link_is_relayed_once_for_one_generation():
    with ExitStack() as stack:
        street = Street(stack)
        mirrored = LINK._replace(source=1, target=0)
        refused = [LINK._replace(target=9), LINK._replace(purpose=Purpose.CONTROL), LINK._replace(target=0)]
        assert [street.ask(claim).recv(1) for claim in refused] == [b""] * 3
        first, again = street.ask(LINK), street.ask(LINK)
        assert first.recv(1) == b"", "a rank that asks again has given up the older connection"
        other = street.ask(mirrored)
        again.sendall(b"hello")
        turn_until(street.reactor, lambda: street.relay._splices[LINK].bytes)
        assert other.recv(10) == b"hello"
        waiting = street.ask(LINK._replace(target=2))
        street.ask(LINK._replace(generation=2))
        assert [sock.recv(1) for sock in (again, other, waiting)] == [b""] * 3
        assert street.lines == ["relayed 0.0 MB over 1 connections between ranks"]
