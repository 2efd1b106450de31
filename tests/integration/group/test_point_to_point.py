"""The point-to-point engines and the queue of a group: order, lost peers, limits, and the end."""

from __future__ import annotations

import threading
import time

import pytest

from ringcomm.clock import Deadline
from ringcomm.errors import (
    MismatchError,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
)
from ringcomm.group.operation_queue import OperationQueue
from tests.integration.group.conftest import LONG, OVER, TAG
from tests.integration.group.works import LIMIT_S, Task


@pytest.mark.parametrize("content", [b"", b"abcd", LONG], ids=["empty", "short", "long"])
@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_messages_arrive(ranks, content, spin_s):
    one, other = ranks(2, 4096, spin_s=spin_s)
    for early in (True, False):
        if early:
            got = other.receive(0, len(content))
            got.waiters += 1  # a thread waits for it, so its engine polls
        sent = one.send(1, content)
        if not early:
            got = other.receive(0, len(content))
        assert (got.ended(), sent.ended()) == (None, None)
        assert bytes(got.into) == content and got.source == 0


def test_a_receive_from_any_peer_gets_the_first_message(ranks):
    one, two, three = ranks(3)
    works = [one.receive(None, 4) for _ in range(2)]
    two.send(0, b"two!")
    assert works[0].ended() is None
    three.send(0, b"3333")
    assert works[1].ended() is None
    assert [(work.source, bytes(work.into)) for work in works] == [(1, b"two!"), (2, b"3333")]


class Interrupted(Task):
    """Ctrl-C comes when it would be done."""

    def finish(self, error=None):
        if error is None:
            raise KeyboardInterrupt
        super().finish(error)


class TestCallers:
    """Callers that wait, and move messages meanwhile."""

    def test_a_caller_moves_all_messages_until_its_own_has_come(self, ranks):
        one, two = ranks(2, 4096)
        mine, other = one.receive(1, len(LONG)), one.receive(1, 4, tag=6)
        sent = [two.send(0, b"abcd", tag=6), two.send(0, LONG)]
        mine.waiters += 1
        one.engine.help(mine)
        assert mine.is_completed() and bytes(mine.into) == LONG and bytes(other.into) == b"abcd"
        assert [work.ended() for work in sent] == [None, None]

    @pytest.mark.parametrize("pause_s", [0.0, 0.02])
    def test_there_and_back_many_times(self, ranks, pause_s):
        """At times the thread has the turn when a caller comes, at times it is free."""
        one, two = ranks(2, 4096)

        def serve():
            for number in range(60):
                got = two.receive(0, 4)
                got.waiters += 1
                two.engine.help(got)
                assert got.ended() is None
                two.send(0, bytes(got.into) * 1024)
                time.sleep(pause_s * (number % 3 == 0))

        server = threading.Thread(target=serve)
        server.start()
        for number in range(60):
            content = number.to_bytes(4, "little")
            one.send(1, content)
            got = one.receive(1, 4096)
            got.waiters += 1
            if number % 5:
                one.engine.help(got)
            assert got.ended() is None and bytes(got.into) == content * 1024
        server.join(LIMIT_S)
        assert not server.is_alive()

    def test_nothing_moves_after_an_interrupt(self, ranks):
        one, two = ranks(2)
        work = Interrupted("recv from rank 1")
        work.waiters += 1
        one.engine.receive(1, TAG, memoryview(bytearray(4)), work, None)
        behind = one.receive(1, 4, tag=6)
        threading.Timer(0.05, two.send, [0, b"abcd"]).start()
        with pytest.raises(KeyboardInterrupt):
            one.engine.help(work)
        two.send(0, b"abcd", tag=6)
        late = one.receive(1, 4, tag=7)
        assert not (work.is_completed() or behind.is_completed() or late.is_completed())
        one.fabric.watch = one.reporter  # by which all learn that the caller ends the group
        one.reporter.abort_error = OVER
        one.fabric.wake()
        assert {str(work.ended()) for work in (work, behind, late)} == {str(OVER)}
        one.engine.close(OVER)
        assert one.engine._thread is not None and not one.engine._thread.is_alive()


class TestLostPeers:
    def test_a_receive_fails_with_its_peer(self, ranks):
        one, two = ranks(2)
        works = [one.receive(1, 4), one.receive(1, 4, tag=6)]
        two.leave()
        errors = [work.ended() for work in works]
        assert isinstance(errors[0], PeerLostError) and errors[0] is errors[1] and errors[0].rank == 1
        assert "recv from rank 1: it closed the connection" in str(errors[0])
        assert one.send(1, b"late").ended() is errors[0], "the engine has ended"

    def test_what_it_sent_before_it_left_is_received(self, ranks):
        one, two, three = ranks(3)
        waiting = one.receive(2, 4)
        assert two.send(0, b"abcd").ended() is None
        two.leave()
        assert one.has_lost(1)
        got = one.receive(1, 4)
        assert got.ended() is None and bytes(got.into) == b"abcd"
        three.send(0, b"3333")
        assert waiting.ended() is None

    def test_a_receive_from_any_peer_waits_while_there_is_one(self, ranks):
        one, two, three = ranks(3)
        work = one.receive(None, 4)
        two.leave()
        assert one.has_lost(1) and not work.is_completed()
        three.leave()
        error = work.ended()
        assert isinstance(error, PeerLostError) and error.rank == 2


class TestFailures:
    def test_ranks_that_disagree(self, ranks):
        one, two = ranks(2)
        work = one.receive(1, 8)
        two.send(0, b"abcd")
        error = work.ended()
        assert isinstance(error, MismatchError) and error.peer == 1
        assert "rank 0: recv(8 bytes, src=1, tag=5) at train.py:7" in str(error)
        assert "send(4 bytes, tag=5)" in str(error)

    def test_the_root_cause_ends_a_wait(self, ranks):
        one, _ = ranks(2)
        one.fabric.watch = one.reporter
        work = one.receive(1, 8)
        one.reporter.abort_error = PeerLostError("rank 1 was killed", rank=1)
        one.fabric.wake()
        assert str(work.ended()) == "rank 1 was killed"


class TestLimits:
    def test_a_peer_that_sends_nothing_is_reported(self, ranks):
        one, _ = ranks(2)
        error = one.receive(1, 8, limit_s=0.01).ended()
        assert isinstance(error, PeerStalledError) and error.rank == 1
        assert "recv from rank 1: not done within 0.01 s" in str(error)
        assert one.reporter.abort_error is not None


class TestClose:
    def test_what_is_pending_fails_and_so_does_what_is_started_later(self, ranks):
        one, _ = ranks(2)
        works = [one.receive(1, 8), one.send(1, LONG)]
        one.engine.close(OVER)
        one.engine.close(NotInitializedError("again"))
        assert [work.ended() for work in [*works, one.receive(None, 8)]] == [OVER] * 3


# ---- the queue in which a group's collectives run ------------------------------------------------


@pytest.fixture
def queue():
    made = OperationQueue("queue")
    yield made
    made.close("the test is over", OVER)
    assert made._thread is None or not made._thread.is_alive() or made._thread is threading.current_thread()


@pytest.fixture
def manual(queue):
    """A queue whose thread does not come to run: only its callers do."""
    queue._thread = threading.current_thread()
    return queue


class Gate:
    """A work that is running until it is opened."""

    def __init__(self):
        self.running, self.opened = threading.Event(), threading.Event()
        self.work = Task("gate", self._run)

    def _run(self):
        self.running.set()
        assert self.opened.wait(LIMIT_S)


def test_works_run_in_the_order_of_the_calls(queue):
    log = []
    works = [Task(str(number), lambda number=number: log.append(number)) for number in range(20)]
    for work in works:
        assert queue.submit(work, inline=False) is work
    assert [work.ended() for work in works] == [None] * 20
    assert log == list(range(20))
    assert len({work.thread for work in works}) == 1 and works[0].thread != threading.get_ident()


def test_an_idle_queue_runs_a_synchronous_work_in_the_callers_thread(queue):
    work = queue.submit(Task("work"), inline=True)
    assert work.is_completed() and work.thread == threading.get_ident() and work.waiters == 1
    assert queue._thread is None, "no thread was needed"


def test_a_thread_that_waits_runs_what_is_before_its_work(manual):
    works = [manual.submit(Task(str(number)), inline=False) for number in range(3)]
    manual.help(works[1])
    assert [work.thread for work in works] == [threading.get_ident()] * 2 + [None]
    manual.help(works[2])
    assert works[2].is_completed()
    manual.help(Task("a work that was never submitted"))


def test_a_thread_that_waits_leaves_a_running_work_to_its_thread(manual):
    gate, behind = Gate(), Task("behind")
    runner = threading.Thread(target=manual.submit, args=(gate.work, True))
    runner.start()
    assert gate.running.wait(LIMIT_S)
    manual.submit(behind, inline=False)
    manual.help(behind)
    assert not behind.is_completed(), "the order of works would be another one on each rank"
    gate.opened.set()
    runner.join(LIMIT_S)
    manual.help(behind)
    assert behind.is_completed()


class TestDrain:
    def test_it_waits_for_what_runs_and_what_is_queued(self, queue):
        gate, behind = Gate(), Task("behind")
        queue.submit(gate.work, inline=False)
        queue.submit(behind, inline=False)
        timer = threading.Timer(0.01, gate.opened.set)
        timer.start()
        queue.drain(Deadline(LIMIT_S))
        timer.join()
        assert gate.work.is_completed() and behind.is_completed()


class TestEndOfTheQueue:
    def test_queued_works_fail_and_no_more_are_accepted(self, queue):
        gate, behind = Gate(), Task("behind")
        queue.submit(gate.work, inline=False)
        assert gate.running.wait(LIMIT_S)
        queue.submit(behind, inline=True)
        closing = threading.Thread(target=queue.close, args=("it called abort()", OVER))
        closing.start()
        assert behind.ended() is OVER and behind.thread is None
        with pytest.raises(NotInitializedError, match=r"it called abort\(\)"):
            queue.submit(Task("late"), inline=True)
        gate.opened.set()
        closing.join(LIMIT_S)
        assert gate.work.ended() is None and not closing.is_alive(), "what runs ends as it does"
