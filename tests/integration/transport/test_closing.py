"""The last message of a link arrives, and sending it succeeds, whenever the receiver closes after it.

One thread plays both ends. A trace function runs the other end's step before the n-th line of the transport
that this end executes, for every n: all the places where the two processes could meet.
"""

from __future__ import annotations

import socket
import sys

import pytest

from ringcomm.transport.local import ReadingLink
from ringcomm.transport.shm import SMALL_RING_BYTES, SharedLink
from ringcomm.transport.tcp import SocketLink
from tests.support.links import linked

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
