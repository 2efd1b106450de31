"""Channels and matching without sockets or threads: bytes trickle through pipes of any size."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from ringcomm.errors import MismatchError, ProtocolError
from ringcomm.group import message_channel
from ringcomm.group.message_channel import SHORT_BYTES, Channel
from ringcomm.group.message_matching import Arrival, Matcher, Receive
from ringcomm.torch.distributed._lane import Lane
from ringcomm.torch.distributed._work import RingcommWork
from ringcomm.transport.memory import memory_fabrics

TAG = (0, 5)


class Note:
    """Stands for a work: notes how it ended."""

    def __init__(self):
        self.ended = []
        self.source = None

    def finish(self, error=None):
        self.ended.append(error)


def receive(peer, nbytes, address=TAG):
    return Receive(peer, address, memoryview(bytearray(nbytes)), Note())


class TestMatcher:
    def test_a_receive_waits_for_its_message(self):
        matcher, wanted = Matcher(), receive(1, 4)
        assert matcher.post(wanted) is None
        assert matcher.match(2, TAG) is None
        assert matcher.match(1, (0, 6)) is None
        assert matcher.match(1, (1, 5)) is None
        assert matcher.match(1, TAG) is wanted
        assert matcher.match(1, TAG) is None

    def test_a_message_waits_for_its_receive(self):
        matcher = Matcher()
        first, second = (Arrival(1, TAG, number, 4, memoryview(b"abcd")) for number in (1, 2))
        matcher.hold(first)
        matcher.hold(second)
        assert matcher.held_bytes(1) == 8
        assert matcher.post(receive(2, 4)) is None
        assert matcher.post(receive(1, 4)) is first
        assert matcher.post(receive(None, 4)) is second
        assert matcher.held_bytes(1) == 0

    def test_the_receive_that_was_posted_first_gets_it(self):
        matcher, anybody, one = Matcher(), receive(None, 4), receive(1, 4)
        matcher.post(anybody)
        matcher.post(one)
        assert [item is anybody for item in matcher.receives()] == [True, False]
        assert matcher.match(1, TAG) is anybody
        matcher.withdraw(one)
        assert matcher.receives() == []


@pytest.mark.parametrize("capacity", [1, 7, 24, 25, 4096, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_every_message_arrives_whole_and_in_order(capacity, seed, monkeypatch):
    monkeypatch.setattr(message_channel, "SHORT_BYTES", 100)
    chance = random.Random(seed)
    a, b = memory_fabrics(2, capacity)
    matchers = Matcher(), Matcher()
    ends = Channel(a.link(1), matchers[0]), Channel(b.link(0), matchers[1])
    sizes = [chance.choice((0, 1, 5, 100, 101, 3000)) for _ in range(12)]
    queues, sent, got = {}, [], []
    for side in (0, 1):
        for number, size in enumerate(sizes):
            message = ((0, number % 3), bytes([number + 100 * side]) * size)
            queues.setdefault(("send", side), []).append(message)
            queues.setdefault(("receive", 1 - side), []).append(message)
    for _ in range(1_000_000):
        for (kind, side), queue in queues.items():
            if queue and chance.random() < 0.3:
                tag, content = queue.pop(0)
                note = Note()
                if kind == "send":
                    ends[side].send(tag, memoryview(content), note)
                    sent.append(note)
                else:
                    wanted = Receive(1 - side, tag, memoryview(bytearray(len(content))), note)
                    got.append((wanted, content))
                    arrival = matchers[side].post(wanted)
                    if arrival is not None:
                        ends[side].serve(wanted, arrival)
        moved = [end.advance() for end in ends]
        if not any(moved) and not any(queues.values()):
            break
    assert len(got) == len(sent) == 24
    assert all(note.ended == [None] for note in sent)
    for wanted, content in got:
        assert wanted.work.ended == [None] and bytes(wanted.view) == content
    assert ends[0].unfinished() == ends[1].unfinished() == []


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("size", [3, SHORT_BYTES + 1])
def test_a_receive_of_another_size_fails_and_nothing_else_does(size, early):
    a, b = memory_fabrics(2)
    matchers = Matcher(), Matcher()
    ends = Channel(a.link(1), matchers[0]), Channel(b.link(0), matchers[1])
    wrong, right, notes = receive(0, 9), receive(0, 2), [Note(), Note()]

    def post():
        for wanted in (wrong, right):
            arrival = matchers[1].post(wanted)
            if arrival is not None:
                ends[1].serve(wanted, arrival)

    def move():
        while ends[0].advance() | ends[1].advance():
            pass

    if not early:
        post()
    ends[0].send(TAG, memoryview(bytes(size)), notes[0])
    ends[0].send(TAG, memoryview(b"ok"), notes[1])
    move()
    if early:
        post()
        move()
    assert isinstance(wrong.work.ended[0], MismatchError)
    assert bytes(right.view) == b"ok" and right.work.ended == [None] and right.work.source == 0
    assert notes[1].ended == [None]
    assert len(notes[0].ended) == 1 and isinstance(notes[0].ended[0], MismatchError) == (size > SHORT_BYTES)


def test_nonsense_is_not_taken_for_a_message():
    a, b = memory_fabrics(2)
    channel = Channel(b.link(0), Matcher())
    a.link(1).send([memoryview(b"GET / HTTP/1.1\r\nHost: example\r\n")])
    with pytest.raises(ProtocolError):
        channel.advance()


class TestLane:
    def work(self, lane, log, name, inner=None):
        def run(work):
            if inner is not None:
                lane.submit(inner, inline=False)
            log.append(name)

        return RingcommWork(name, [], run, lane.help)

    def test_what_a_work_starts_runs_before_what_is_queued(self):
        lane, log = Lane("lane"), []
        inner = self.work(lane, log, "inner")
        works = [self.work(lane, log, "outer", inner), self.work(lane, log, "next")]
        for work in works:
            lane.submit(work, inline=False)
        for work in reversed(works):
            work.wait()
        assert log == ["inner", "outer", "next"]

    def test_an_idle_lane_runs_it_in_the_callers_thread(self):
        import threading

        lane, seen = Lane("lane"), []
        work = RingcommWork("work", [], lambda _: seen.append(threading.get_ident()), lane.help)
        assert lane.submit(work, inline=True).is_completed()
        assert seen == [threading.get_ident()]

    def test_failures_belong_to_whoever_waits(self):
        def fail(_):
            raise KeyError("x")

        lane = Lane("lane")
        work = lane.submit(RingcommWork("work", [], fail, lane.help), inline=True)
        assert not work.is_success() and isinstance(work.exception(), KeyError)
        with pytest.raises(KeyError):
            work.wait()
        with pytest.raises(RuntimeError, match="KeyError"):
            work.get_future().wait()
