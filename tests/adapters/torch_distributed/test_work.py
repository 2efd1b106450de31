"""A pending operation as PyTorch sees it: waits, time limits, failures, interruptions and futures."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.errors import PeerLostError, PeerStalledError
from ringcomm.torch.distributed._work import RingcommWork, Together

SOON = timedelta(seconds=0.01)
LOST = PeerLostError("rank 1 was lost", rank=1)


def finished(error=None, result=()):
    work = RingcommWork("work", list(result))
    work.finish(error)
    return work


class TestWork:
    def test_a_work_that_is_done(self):
        tensor = torch.ones(2)
        work = finished(result=[tensor])
        assert work.wait() and work.wait(SOON) and work.is_completed() and work.is_success()
        work.synchronize()
        assert work.exception() is None and work.result() == [tensor]
        assert work.source_rank() == work._source_rank() == -1 and work.where() == ""

    def test_a_wait_with_a_time_limit(self):
        work = RingcommWork("allreduce", [])
        with pytest.raises(PeerStalledError, match=r"allreduce is not done within 0\.01 s"):
            work.wait(SOON)
        assert not work.is_completed() and not work.is_success() and work.waiters == 0
        work.finish()
        assert work.wait(SOON)

    def test_all_waiting_threads_are_woken(self):
        work, found = RingcommWork("work", []), []
        threads = [threading.Thread(target=lambda: found.append(work.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        work.finish()
        for thread in threads:
            thread.join(60.0)
        assert found == [True] * 3

    def test_the_first_end_counts(self):
        for first, second in ((LOST, None), (None, LOST), (LOST, KeyError("x"))):
            work = finished(first)
            work.finish(second)
            assert work.exception() is first and work.is_success() == (first is None)

    def test_a_failure_is_raised_in_every_wait_without_inner_frames(self):
        work = finished(LOST)
        for _ in range(2):
            with pytest.raises(PeerLostError) as caught:
                work.wait()
            assert caught.value is LOST
            # "call", and "_fn" of Dynamo once it is imported, keep the method out of compiled programs.
            names = [entry.name for entry in caught.traceback][1:]
            assert names[-2:] == ["wait", "_raise_error"] and set(names[:-2]) <= {"call", "_fn"}

    def test_the_epilogue_belongs_to_a_success(self):
        log = []
        for error in (None, LOST):
            work = RingcommWork("recv", [])
            work.epilogue = lambda error=error: log.append(error)
            work.finish(error)
            work.finish()
        assert log == [None]

    def test_it_runs_once_and_keeps_what_it_raises(self):
        log = []
        work = RingcommWork("work", [], log.append)
        work.perform()
        assert log == [work] and work.is_success()

        def fail(_):
            raise KeyError("x")

        work = RingcommWork("work", [], fail)
        work.perform()
        assert isinstance(work.exception(), KeyError)

    def test_ctrl_c_in_the_running_thread_is_passed_on(self):
        def interrupt(_):
            raise KeyboardInterrupt

        work = RingcommWork("work", [], interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.perform()
        assert isinstance(work.exception(), KeyboardInterrupt)


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

    def test_the_end_may_come_at_once(self):
        work = RingcommWork("work", [], interrupted=lambda work, _: work.finish(LOST))
        self.interrupted(work)
        assert work.exception() is LOST

    def test_a_work_of_no_group_is_left_as_it_is(self):
        work = RingcommWork("work", [])
        self.interrupted(work)
        assert not work.is_completed()


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


class TestTogether:
    def test_it_is_done_when_all_are(self):
        works = [RingcommWork(str(number), [torch.ones(1)]) for number in range(2)]
        together = Together(works)
        works[0].finish()
        assert not together.is_completed() and not together.is_success()
        with pytest.raises(PeerStalledError, match="1 is not done within"):
            together.wait(SOON)
        works[1].finish()
        assert together.is_completed() and together.is_success() and together.wait()
        assert together.exception() is None and len(together.result()) == 2
        assert len(together.get_future().wait()) == 2

    def test_it_fails_with_the_first_failure(self):
        other = KeyError("x")
        together = Together([finished(), finished(LOST), finished(other)])
        assert together.is_completed() and not together.is_success() and together.exception() is LOST
        with pytest.raises(PeerLostError):
            together.wait()
