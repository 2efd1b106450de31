"""The right to move messages: of callers that wait, and of the thread that has it at other times."""

from __future__ import annotations

import threading

import pytest

from ringcomm.group.turn import Turn
from tests.support.service import eventually

LIMIT_S = 60.0


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
