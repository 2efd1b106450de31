"""The contract of transports, run against every transport there is; and the last message of a link."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.storage.keys import make_certificate
from ringcomm.transport.base import LinkClosed, Subset, Watch
from ringcomm.transport.connect import listen
from ringcomm.transport.local import ReadingLink, make_links
from ringcomm.transport.memory import memory_fabrics
from ringcomm.transport.shm import MASK, RING_BYTES, SMALL_RING_BYTES, SharedLink
from ringcomm.transport.tcp import SocketFabric, SocketLink
from ringcomm.transport.tls import Tls
from tests.support import transport_contract as contract
from tests.support.links import linked, secured


def tcp_pair(address="127.0.0.1"):
    listener = listen(address)
    listener.setblocking(True)
    dialled = socket.create_connection(listener.getsockname()[:2])
    accepted, _ = listener.accept()
    listener.close()
    return dialled, accepted


def narrow(sockets, buffer_bytes):
    """With so small buffers that everything is partial."""
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return sockets


def fabrics_of(sockets):
    return [SocketFabric(0, {1: SocketLink(1, sockets[0])}), SocketFabric(1, {0: SocketLink(0, sockets[1])})]


def with_small_rings():
    """Ends as where many ranks share a host."""
    sockets = narrow(socket.socketpair(), 2048)
    links = linked(ReadingLink, SMALL_RING_BYTES, RING_BYTES, sockets=sockets)
    return [SocketFabric(rank, {1 - rank: links[rank]}) for rank in range(2)]


def local_fabrics(wishes=("auto", "auto"), buffer_bytes=None):
    """Each end as it wishes; "memory" reads the other's (which is the same, here)."""
    sockets = socket.socketpair()
    if buffer_bytes:
        narrow(sockets, buffer_bytes)
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(make_links, [{1: sockets[0]}, {0: sockets[1]}], wishes)
        return [SocketFabric(rank, links) for rank, links in enumerate(ends)]


def lending_above(most_bytes):
    """Ends that send up to so many bytes through the ring."""
    fabrics = local_fabrics()
    for fabric in fabrics:
        fabric.link(1 - fabric.rank).lend_above(most_bytes)
    return fabrics


class OwnSubset(Subset):
    """A subset that owns its fabric; the fabric of others belongs to the engine, which closes it."""

    def close(self):
        self._fabric.close()


_tls = []


def encrypted(sockets):
    """The same, encrypted."""
    if not _tls:
        _tls.append(Tls(make_certificate()))
    ends = secured(sockets, _tls[0])
    for end in ends:
        end.trust()
    return ends


TRANSPORTS = {
    "local": local_fabrics,
    "local, narrow": lambda: local_fabrics(buffer_bytes=2048),
    "local, with small rings": with_small_rings,
    "local, only through rings": lambda: lending_above(MASK),
    "local, lent above 2 KiB": lambda: lending_above(2048),
    "shm": lambda: local_fabrics(("shm", "shm")),
    "shm, narrow": lambda: local_fabrics(("shm", "shm"), 2048),
    "memory": lambda: memory_fabrics(2),
    "memory of 100 bytes": lambda: memory_fabrics(2, 100),
    "subset": lambda: [OwnSubset(fabric, [0, 1]) for fabric in memory_fabrics(4)[:2]],
    "tcp": lambda: fabrics_of(tcp_pair()),
    "tcp, narrow": lambda: fabrics_of(narrow(tcp_pair(), 32768)),
    "tls": lambda: fabrics_of(encrypted(tcp_pair())),
    "tls, very narrow": lambda: fabrics_of(encrypted(narrow(socket.socketpair(), 2048))),
    "unix": lambda: fabrics_of(socket.socketpair()),
    "unix, narrow": lambda: fabrics_of(narrow(socket.socketpair(), 2048)),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(transport, check):
    contract.run(check, TRANSPORTS[transport])


def test_the_end_of_a_link_names_the_rank_in_the_job():
    fabrics = memory_fabrics(4)
    fabrics[1].close()
    with pytest.raises(LinkClosed) as raised:
        Subset(fabrics[3], [1, 3]).link(0).recv([memoryview(bytearray(1))])
    assert raised.value.peer == 1


class Bell(Watch):
    """A watch that can be triggered."""

    def __init__(self):
        self.inside, self.outside = socket.socketpair()
        self.closed = False

    def fileno(self):
        return -1 if self.closed else self.inside.fileno()

    def check(self):
        return None

    def close(self):
        self.closed = True
        self.inside.close()
        self.outside.close()


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    bell.close()


@pytest.mark.parametrize("make", [tcp_pair, socket.socketpair])
def test_a_watch_ends_a_wait(make, bell):
    sockets = make()
    one = SocketFabric(0, {1: SocketLink(1, sockets[0])}, watch=bell)
    other = SocketFabric(1, {0: SocketLink(0, sockets[1])})
    try:
        bell.outside.send(b"!")
        one.wait([one.link(1)], [], 600.0)  # the test's own time limit is the assertion
        bell.close()
        one.wait([one.link(1)], [], 0.01)  # a watch that is gone does not matter
    finally:
        one.close()
        other.close()


# ---- the last message of a link ------------------------------------------------------------------


MAX_LINES = 150


def reading(most_bytes):
    links = linked(ReadingLink, SMALL_RING_BYTES)
    for link in links:
        link.lend_above(most_bytes)
    return links


LINKS = {
    "shm": lambda: linked(SharedLink, SMALL_RING_BYTES),
    "memory": lambda: reading(100_000),
    "lent memory": lambda: reading(2048),
    "unix": lambda: [SocketLink(1 - rank, sock) for rank, sock in enumerate(socket.socketpair())],
}


class Before:
    """Run a step once, before the n-th executed line of ``ringcomm.transport``, if the block has one."""

    def __init__(self, number, step):
        self.left, self.step, self.reached = number, step, False

    def _trace(self, frame, event, _):
        if "transport" not in frame.f_code.co_filename:
            return None
        if event == "line" and not self.reached:
            self.left -= 1
            if not self.left:
                self.reached = True
                sys.settrace(None)
                self.step()
                sys.settrace(self._trace)
        return self._trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def sent(link, data):
    """Send everything."""
    place = 0
    while place < len(data):
        place += link.send((memoryview(data)[place:],))


class Receiver:
    """The other end: receives so many bytes, closes the link, and does nothing after that."""

    def __init__(self, link, nbytes):
        self.link, self.data, self.place = link, bytearray(nbytes), 0

    def step(self):
        while self.place < len(self.data):
            got = self.link.recv((memoryview(self.data)[self.place :],))
            if not got:
                self.link.poll_events(True, False)  # what was read is announced before an end sleeps
                self.link.woken(0)
                return
            self.place += got
        self.link.close()


@pytest.mark.parametrize(
    "kind, nbytes",
    [("shm", 1), ("shm", 150_000), ("memory", 5000), ("lent memory", 5000), ("unix", 150_000)],
)
def test_the_receiver_of_the_last_message_closes_at_any_time(kind, nbytes):
    data = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    for number in range(1, MAX_LINES):
        links = LINKS[kind]()
        receiver = Receiver(links[1], nbytes)
        place = 0
        with Before(number, receiver.step) as step:
            while place < nbytes:
                taken = links[0].send((memoryview(data)[place:],))
                place += taken
                if not taken and step.reached:
                    receiver.step()
        receiver.step()
        assert receiver.data == data, f"before line {number}"
        for link in links:
            link.close()
        if not step.reached:
            break
    assert number > 2


@pytest.mark.parametrize(
    "kind, nbytes", [("shm", 1), ("shm", 60_000), ("memory", 5000), ("unix", 5000)]
)
def test_the_sender_closes_after_the_last_message_at_any_time(kind, nbytes):
    for number in range(1, MAX_LINES):
        sender, link = links = LINKS[kind]()
        data, got = memoryview(bytearray(nbytes)), 0

        def send(sender=sender):
            sent(sender, bytes([7]) * nbytes)
            sender.close()

        with Before(number, send) as step:
            for _ in range(3):
                if got < nbytes:
                    got += link.recv((data[got:],))
        if step.reached:
            while got < nbytes:
                got += link.recv((data[got:],))
            assert bytes(data) == bytes([7]) * nbytes, f"before line {number}"
        for end in links:
            end.close()
        if not step.reached:
            break
    assert number > 2
