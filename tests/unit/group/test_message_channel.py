"""The messages of channels: order, room, what a peer may not send, and what is recorded of them."""

from __future__ import annotations

import random

import pytest

from ringcomm.errors import PeerLostError, ProtocolError
from ringcomm.group import message_channel
from ringcomm.group.message_channel import OVERHEAD_BYTES, Channel, Disagreement, Matcher, Receive
from ringcomm.group.point_to_point import RECEIVE, SEND, MessageHistory
from ringcomm.transport.memory import memory_fabrics
from tests.integration.group.works import Task
from tests.support.messages import TAG, Note, Pair, receive

SHORT_BYTES = 32 * 1024
SHORT, CREDIT = 1, 5


@pytest.fixture(autouse=True)
def _announce_above_short_bytes(monkeypatch):
    monkeypatch.setattr(message_channel, "SHORT_BYTES", SHORT_BYTES)


class End:
    """This rank's channel to rank 0, and the other end of its link."""

    def __init__(self, capacity=1 << 20):
        there, here = memory_fabrics(2, capacity)
        self.link = there.link(1)
        self.matcher = Matcher()
        self.channel = Channel(here.link(0), self.matcher)

    def frame(self, kind, number, nbytes, content=b"", tag=TAG, elements=0):
        """Receive a frame."""
        head = message_channel._HEAD.pack(message_channel._MAGIC, kind, *tag, elements, number, nbytes)
        self.link.send([memoryview(head + content)])
        self.channel.advance()

    def post(self, nbytes, peer=0):
        receive = Receive(peer, TAG, memoryview(bytearray(nbytes)), Note())
        arrival = self.matcher.post(receive)
        if arrival is not None:
            self.channel.serve(receive, arrival)
        return receive

    def sent(self):
        """The kinds and numbers of the frames that have been sent."""
        self.channel.advance()
        data = bytearray(1 << 16)
        data = data[: self.link.recv([memoryview(data)])]
        heads = range(0, len(data), message_channel.HEAD_BYTES)
        facts = [message_channel._HEAD.unpack_from(data, start) for start in heads]
        return [(kind, number) for _, kind, _, _, _, number, _ in facts]


@pytest.fixture
def end():
    return End()


class TestInvalidFrames:
    @pytest.fixture
    def refused(self, end):
        """Receive a frame, which must be refused; the reason."""

        def receive(*frame, **options):
            with pytest.raises(ProtocolError) as caught:
                end.frame(*frame, **options)
            text = str(caught.value)
            assert text.startswith("rank 0 ") and text.endswith("another version of ringcomm, or is broken")
            return text

        return receive

    @pytest.mark.parametrize(
        "kind, nbytes", [(0, 0), (CREDIT + 1, 0), (SHORT, SHORT_BYTES + 1)], ids=["0", "6", "long"]
    )
    def test_a_frame_of_no_kind(self, end, kind, nbytes):
        with pytest.raises(ProtocolError, match="what rank 0 sent is not the start of a message"):
            end.frame(kind, 1, nbytes)

    def test_credit_for_bytes_that_were_not_sent(self, end, refused):
        end.channel.send(TAG, memoryview(b"abcd"), Note())
        assert f"gives credit for 1000 bytes, and has {OVERHEAD_BYTES + 4}" in refused(CREDIT, 0, 1000)

    def test_more_short_messages_than_there_is_room_for(self, monkeypatch, end, refused):
        monkeypatch.setattr(message_channel, "HELD_BYTES", 2 * (OVERHEAD_BYTES + 4))
        for number in (1, 2):
            end.frame(SHORT, number, 4, b"abcd")
        text = refused(SHORT, 3, 4, b"abcd")
        assert f"sends short messages beyond the limit of {2 * (OVERHEAD_BYTES + 4)} bytes" in text


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


class TestFlowControl:
    @pytest.fixture(autouse=True)
    def little_room(self, monkeypatch):
        """Room for ten messages of 1000 bytes."""
        monkeypatch.setattr(message_channel, "HELD_BYTES", 10 * (1000 + message_channel.OVERHEAD_BYTES))

    def test_the_receiver_holds_no_more_than_the_limit(self):
        pair = Pair()
        notes = [pair.send((0, tag), bytes(1000)) for tag in range(50)]
        pair.move()
        held = [arrival for queue in pair.matchers[1]._arrivals.values() for arrival in queue]
        assert len(held) == 50
        assert sum(arrival.content is not None for arrival in held) == 10
        assert [note.ended for note in notes] == [[None]] * 10 + [[]] * 40


def test_the_receive_that_was_posted_first_gets_it():
    matcher, any_peer, one = Matcher(), receive(None, 4), receive(1, 4)
    matcher.post(any_peer)
    matcher.post(one)
    assert [item is any_peer for item in matcher.receives()] == [True, False]
    assert matcher.match(1, TAG) is any_peer
    matcher.withdraw(one)
    assert matcher.receives() == []


# ---- what is recorded of point-to-point messages, without an engine ------------------------------


@pytest.fixture
def history():
    return MessageHistory({7: "float32"}.get)


def states(history):
    return [(row["kind"], row["op"], row["state"]) for row in history.rows()]


def test_messages_are_numbered_by_peer_and_way_and_the_last_one_is_kept(history):
    for number in range(6):
        work = Task(f"message {number}")
        history.post(RECEIVE, 1, 0, 7, 8, work)
    assert states(history) == [("recv", 6, "submitted")]
    work.finish()
    (row,) = history.rows()
    assert (row["state"], row["what"], row["peer"]) == ("done", "8 bytes of float32", 1)
    history.post(SEND, 2, 3, 0, 16, Task("sent"))
    (row,) = history.rows()
    assert (row["what"], row["name"], row["site"]) == ("16 bytes, tag 3", "", "")
    channel = history.channel("messages", [10, 11, 12])
    assert channel["messages"] == {"11": [0, 6], "12": [1, 0]} and channel["operations"][0]["peer"] == 12


def test_what_was_waited_for_has_failed(history):
    found = []
    history.on_failure = found.append
    work, other = Task("x"), Task("y")
    message = history.post(RECEIVE, 1, 0, 7, 8, work)
    history.post(RECEIVE, 1, 0, 7, 8, other)
    history.begin_wait(message, work)
    error = PeerLostError("rank 1 was lost", rank=1)
    history.fail(error)
    work.finish(error)
    assert [row["state"] for row in history.rows()] == ["failed"] and found == [error]
    assert history.rows()[0]["error"] == "PeerLostError: rank 1 was lost"
