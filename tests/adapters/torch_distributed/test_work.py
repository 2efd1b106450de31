"""A pending operation as PyTorch sees it: waits, time limits, failures, interruptions and futures."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.errors import PeerLostError, PeerStalledError
from ringcomm.group import point_to_point
from ringcomm.group.failures import Reporter
from ringcomm.group.message_channel import SHORT_BYTES
from ringcomm.group.point_to_point import PointToPoint
from ringcomm.torch.distributed._operations import RingcommWork
from ringcomm.transport.memory import memory_fabrics
from tests.support.messages import TAG

SOON = timedelta(seconds=0.01)
LOST = PeerLostError("rank 1 was lost", rank=1)


def finished(error=None, result=()):
    work = RingcommWork("work", list(result))
    work.finish(error)
    return work


class TestWork:
    def test_a_wait_with_a_time_limit(self):
        work = RingcommWork("allreduce", [])
        with pytest.raises(PeerStalledError, match=r"allreduce is not done within 0\.01 s"):
            work.wait(SOON)
        assert not work.is_completed() and not work.is_success() and work.waiters == 0
        work.finish()
        assert work.wait(SOON)


class TestInterruptedWaits:
    def interrupted(self, work):
        def helper(_):
            raise KeyboardInterrupt

        work._helper = helper
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert work.waiters == 0

    def test_it_ends_the_group_and_waits_until_the_tensors_are_free(self):
        log = []

        def end(work, problem):
            log.append(type(problem))
            threading.Timer(0.02, work.finish, (LOST,)).start()

        work = RingcommWork("work", [], interrupted=end)
        self.interrupted(work)
        assert log == [KeyboardInterrupt] and work.is_completed()


class TestFutures:
    def test_it_has_the_result_before_and_after_the_end(self):
        tensor = torch.ones(2)
        for done_before in (True, False):
            work, log = RingcommWork("work", [tensor]), []
            if done_before:
                work.finish()
            future = work.get_future()
            assert work.get_future() is future
            future.then(lambda item, log=log: log.append(item.value()[0] is tensor))
            work.finish()
            assert future.wait()[0] is tensor and log == [True]

    def test_a_failure_fails_it(self):
        work = RingcommWork("work", [])
        future = work.get_future()
        work.finish(LOST)
        with pytest.raises(RuntimeError, match="PeerLostError: rank 1 was lost"):
            future.wait()


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
