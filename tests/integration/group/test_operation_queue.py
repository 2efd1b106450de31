"""The queue in which a group's collectives run: their order, their threads, and its end."""

from __future__ import annotations

import threading

import pytest

from ringcomm.clock import Deadline
from ringcomm.errors import NotInitializedError
from ringcomm.group.operation_queue import OperationQueue, Turn
from tests.integration.group.works import LIMIT_S, Task
from tests.support.service import eventually

OVER = NotInitializedError("the group has ended")


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


def in_thread(function):
    """Run it in another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


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


class TestClose:
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


# ---- the right to move messages, of callers that wait and of the thread -------------------------


class Thread:
    """The thread of a group: it sleeps with the turn until it is woken or a caller asks for the turn."""

    def __init__(self) -> None:
        self.turn = Turn(self.wake, 0.002)
        self.woken = threading.Event()
        self.rounds = 0
        self.over = False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def wake(self) -> None:
        self.woken.set()

    def run(self) -> None:
        while not self.over:
            self.turn.pause()
            with self.turn:
                self.rounds += 1
                while not (self.turn.wanted or self.over):
                    self.woken.wait(LIMIT_S)
                    self.woken.clear()


@pytest.fixture
def one():
    made = Thread()
    yield made
    made.over = True
    made.turn.hurry()
    if made.thread.is_alive():
        made.thread.join(LIMIT_S)
        assert not made.thread.is_alive()


def test_a_free_turn_is_taken_at_once_and_by_one_caller(one):
    turn = one.turn
    assert turn.take(at_once=True) and turn.wanted and turn.is_mine()
    assert not turn.take() and not turn.take(at_once=True)
    turn.give_back(needed=False)
    assert not turn.wanted and not turn.is_mine()
    assert turn.take()
    turn.give_back(needed=False)


def test_the_thread_gives_it_to_a_caller_that_waits(one):
    one.thread.start()
    assert eventually(lambda: one.rounds == 1)
    assert not one.turn.take(at_once=True) and not one.turn.wanted
    assert one.turn.take() and one.turn.is_mine()
    assert one.rounds == 1
    one.turn.give_back(needed=True)
    assert eventually(lambda: one.rounds == 2)
