"""Channels and matching without sockets or threads: bytes trickle through pipes of any size."""

from __future__ import annotations

import random
import threading

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.errors import PeerStalledError, ProtocolError
from ringcomm.group import message_channel, point_to_point
from ringcomm.group.message_channel import SHORT_BYTES, Channel, Disagreement
from ringcomm.group.message_matching import Arrival, Matcher, Receive
from ringcomm.group.operation_queue import OperationQueue
from ringcomm.group.point_to_point import PointToPoint
from ringcomm.group.reporter import Reporter
from ringcomm.torch.distributed._elements import type_code, type_name
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

    def where(self):
        return " at train.py:7"


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
        first, second = (Arrival(1, TAG, number, 0, 4, memoryview(b"abcd")) for number in (1, 2))
        matcher.hold(first)
        matcher.hold(second)
        assert matcher.post(receive(2, 4)) is None
        assert matcher.post(receive(1, 4)) is first
        assert matcher.post(receive(None, 4)) is second
        assert matcher.post(receive(1, 4)) is None

    def test_nothing_is_kept_of_tags_that_are_done(self):
        matcher = Matcher()
        for tag in range(100):
            matcher.hold(Arrival(1, (0, tag), tag, 0, 4, memoryview(b"abcd")))
            assert matcher.post(receive(1, 4, (0, tag))) is not None
        assert matcher._arrivals == matcher._receives == {}

    def test_the_receive_that_was_posted_first_gets_it(self):
        matcher, any_peer, one = Matcher(), receive(None, 4), receive(1, 4)
        matcher.post(any_peer)
        matcher.post(one)
        assert [item is any_peer for item in matcher.receives()] == [True, False]
        assert matcher.match(1, TAG) is any_peer
        matcher.withdraw(one)
        assert matcher.receives() == []


@pytest.mark.parametrize("capacity", [1, 7, 24, 25, 4096, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_every_message_arrives_whole_and_in_order(capacity, seed, monkeypatch):
    monkeypatch.setattr(message_channel, "SHORT_BYTES", 100)
    chance = random.Random(seed)
    a, b = memory_fabrics(2, capacity)
    matchers = Matcher(), Matcher()
    ends = Channel(a.link(1), matchers[0], type_name), Channel(b.link(0), matchers[1], type_name)
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


class Pair:
    """The channels of two ranks to each other; ``sides[1]`` receives what ``sides[0]`` sends."""

    def __init__(self, capacity=1 << 20):
        a, b = memory_fabrics(2, capacity)
        self.matchers = Matcher(), Matcher()
        self.sides = (
            Channel(a.link(1), self.matchers[0], type_name),
            Channel(b.link(0), self.matchers[1], type_name),
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


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("sent, wanted", [(3, 9), (9, 3), (3, 0), (SHORT_BYTES + 1, 9), (9, SHORT_BYTES + 1)])
def test_a_receive_of_another_size_is_found(sent, wanted, early):
    pair, place = Pair(), receive(0, wanted)
    if not early:
        pair.post(place)
    pair.send(TAG, bytes(sent))
    with pytest.raises(Disagreement) as caught:
        pair.move()
        pair.post(place)
    assert caught.value.peer == 0
    here = f"recv({wanted} bytes, src=0, tag=5) at train.py:7"
    assert str(caught.value) == f"{here}; rank 0 makes another call: send({sent} bytes, tag=5)."
    assert place.work.ended == []


@pytest.mark.parametrize("size", [8, SHORT_BYTES + 4])
def test_a_receive_of_another_type_is_found(size):
    pair, place = Pair(), receive(0, size)
    place.elements = type_code(torch.int32)
    pair.post(place)
    pair.send(TAG, bytes(size), type_code(torch.float32))
    with pytest.raises(Disagreement, match=f"{size} bytes of int32, .* send.{size} bytes of float32"):
        pair.move()


def test_types_have_codes_of_their_own():
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert len({type_code(dtype) for dtype in dtypes}) == len(dtypes) > 20
    assert type_code(torch.float32) == 0xD8CA9648
    assert [type_name(type_code(dtype)) for dtype in (torch.bool, torch.bfloat16)] == ["bool", "bfloat16"]
    assert "does not have" in type_name(1)


class TestFlowControl:
    @pytest.fixture(autouse=True)
    def little_room(self, monkeypatch):
        """Room for ten messages of 1000 bytes."""
        monkeypatch.setattr(message_channel, "HELD_BYTES", 10 * (1000 + message_channel.OVERHEAD_BYTES))

    def test_what_no_receive_asks_for_does_not_hold_up_what_is_behind_it(self):
        pair, contents = Pair(4096), [bytes([number]) * 1000 for number in range(50)]
        notes = [pair.send((0, tag), content) for tag, content in enumerate(contents)]
        pair.move()
        places = [receive(0, 1000, (0, tag)) for tag in range(50)]
        for place in reversed(places):
            pair.post(place)
            pair.move()
        assert [bytes(place.view) for place in places] == contents
        assert all(note.ended == [None] for note in notes)
        assert pair.sides[0].unfinished() == pair.sides[1].unfinished() == []

    def test_the_receiver_holds_no_more_than_the_limit(self):
        pair = Pair()
        notes = [pair.send((0, tag), bytes(1000)) for tag in range(50)]
        pair.move()
        held = [arrival for queue in pair.matchers[1]._arrivals.values() for arrival in queue]
        assert len(held) == 50
        assert sum(arrival.content is not None for arrival in held) == 10
        assert [note.ended for note in notes] == [[None]] * 10 + [[]] * 40

    @pytest.mark.parametrize("early", [True, False])
    def test_what_is_received_makes_room(self, early):
        pair = Pair()
        for number in range(100):
            place = receive(0, 1000)
            if early:
                pair.post(place)
            note = pair.send(TAG, bytes([number]) * 1000)
            pair.move()
            assert note.ended == [None], "sent right away"
            if not early:
                pair.post(place)
                pair.move()
            assert bytes(place.view) == bytes([number]) * 1000


class TestLimits:
    """A point-to-point engine whose thread is this one, with a limit that is over at once."""

    @pytest.fixture
    def messages(self, monkeypatch):
        a, self.other = memory_fabrics(2, 100)
        messages = PointToPoint(a, Reporter(), 0.0, "messages")
        messages._thread = threading.current_thread()
        # So the last byte moved just now, whenever it did.
        monkeypatch.setattr(point_to_point, "monotonic", lambda: messages._channels[1].moved_s)
        return messages

    def test_what_fails_fails_the_work_whose_limit_has_expired_too(self, messages):
        works = [RingcommWork(f"recv {tag}", []) for tag in range(2)]
        for tag, work in enumerate(works):
            messages.receive(1, (0, tag), memoryview(bytearray(4)), work, 0.0 if tag else None)
        messages._cycle()
        with pytest.raises(PeerStalledError, match="recv 1.*not done within 0 s") as caught:
            messages._check_limits()
        messages._fail_all(caught.value)
        assert [work.exception() for work in works] == [caught.value] * 2

    def test_a_message_that_moves_has_time(self, messages):
        moving, waiting = RingcommWork("send 0", []), RingcommWork("send 1", [])
        messages.send(1, TAG, memoryview(bytes(1000)), moving, 1e-9)
        messages._cycle()
        assert messages._check_limits() < 1
        messages.send(1, TAG, memoryview(bytes(SHORT_BYTES + 1)), waiting, 1e-9)
        messages._cycle()
        with pytest.raises(PeerStalledError, match="send 1.*not done within 1e-09 s"):
            messages._check_limits()
        assert not moving.is_completed()

    def test_a_receive_from_any_peer_ends_alone(self, messages):
        work = RingcommWork("recv from any peer", [])
        messages.receive(None, TAG, memoryview(bytearray(4)), work, 0.0)
        messages._cycle()
        messages._check_limits()
        assert isinstance(work.exception(), PeerStalledError)
        assert messages._matcher.receives() == []


def test_nonsense_is_not_taken_for_a_message():
    a, b = memory_fabrics(2)
    channel = Channel(b.link(0), Matcher())
    a.link(1).send([memoryview(b"GET / HTTP/1.1\r\nHost: example\r\n")])
    with pytest.raises(ProtocolError):
        channel.advance()


class TestOperationQueue:
    def work(self, queue, log, name, inner=None):
        def run(work):
            if inner is not None:
                queue.submit(inner, inline=False)
            log.append(name)

        return RingcommWork(name, [], run, queue.help)

    def test_what_a_work_starts_runs_before_what_is_queued(self):
        queue, log = OperationQueue("queue"), []
        inner = self.work(queue, log, "inner")
        works = [self.work(queue, log, "outer", inner), self.work(queue, log, "next")]
        for work in works:
            queue.submit(work, inline=False)
        for work in reversed(works):
            work.wait()
        assert log == ["inner", "outer", "next"]

    def test_an_idle_queue_runs_it_in_the_callers_thread(self):
        queue, seen = OperationQueue("queue"), []
        work = RingcommWork("work", [], lambda _: seen.append(threading.get_ident()), queue.help)
        assert queue.submit(work, inline=True).is_completed()
        assert seen == [threading.get_ident()]

    def test_failures_belong_to_the_waiting_thread(self):
        def fail(_):
            raise KeyError("x")

        queue = OperationQueue("queue")
        work = queue.submit(RingcommWork("work", [], fail, queue.help), inline=True)
        assert not work.is_success() and isinstance(work.exception(), KeyError)
        with pytest.raises(KeyError):
            work.wait()
        with pytest.raises(RuntimeError, match="KeyError"):
            work.get_future().wait()
