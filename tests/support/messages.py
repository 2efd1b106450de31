"""Messages between ranks without a framework: the work that waits for one, and receives."""

from __future__ import annotations

from ringcomm.group.message_channel import Channel, Matcher, Receive
from ringcomm.transport.memory import memory_fabrics

TAG = (0, 5)


class Note:
    """Stands for a work, and notes how it ended."""

    def __init__(self):
        self.ended = []
        self.source = None

    def finish(self, error=None):
        self.ended.append(error)

    def where(self):
        return " at train.py:7"


def receive(peer, nbytes, address=TAG):
    return Receive(peer, address, memoryview(bytearray(nbytes)), Note())


class Pair:
    """The channels of two ranks to each other; ``sides[1]`` receives what ``sides[0]`` sends."""

    def __init__(self, capacity=1 << 20, **options):
        a, b = memory_fabrics(2, capacity)
        self.matchers = Matcher(), Matcher()
        self.sides = (
            Channel(a.link(1), self.matchers[0], **options),
            Channel(b.link(0), self.matchers[1], **options),
        )

    def send(self, address, content, elements=0):
        note = Note()
        self.sides[0].send(address, memoryview(content), note, elements)
        return note

    def post(self, wanted):
        arrival = self.matchers[1].post(wanted)
        if arrival is not None:
            self.sides[1].serve(wanted, arrival)

    def move(self):
        while self.sides[0].advance() | self.sides[1].advance():
            pass
