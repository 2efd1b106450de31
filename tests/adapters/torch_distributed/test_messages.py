"""Messages of a group with the types and the works of PyTorch, without sockets or threads."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.errors import PeerStalledError
from ringcomm.group import point_to_point
from ringcomm.group.failures import Reporter
from ringcomm.group.message_channel import SHORT_BYTES, Disagreement
from ringcomm.group.operation_queue import OperationQueue
from ringcomm.group.point_to_point import PointToPoint
from ringcomm.torch.distributed._elements import type_code, type_name
from ringcomm.torch.distributed._work import RingcommWork
from ringcomm.transport.memory import memory_fabrics
from tests.support.messages import TAG, Pair, receive


@pytest.mark.parametrize("size", [8, SHORT_BYTES + 4])
def test_a_receive_of_another_type_is_found(size):
    pair, place = Pair(type_name=type_name), receive(0, size)
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


def test_failures_of_a_work_belong_to_the_waiting_thread():
    def fail(_):
        raise KeyError("x")

    queue = OperationQueue("queue")
    work = queue.submit(RingcommWork("work", [], fail, queue.help), inline=True)
    assert not work.is_success() and isinstance(work.exception(), KeyError)
    with pytest.raises(KeyError):
        work.wait()
    with pytest.raises(RuntimeError, match="KeyError"):
        work.get_future().wait()
