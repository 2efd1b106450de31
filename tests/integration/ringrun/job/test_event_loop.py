"""The supervisor's event loop: descriptors, timers by a clock that the test sets, and other threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator, List

import pytest

from ringrun.job.agents import READ, WRITE, Loop


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def loop(time: Time) -> Iterator[Loop]:
    made = Loop(time)
    yield made
    made.close()


def test_timers_run_once_when_they_are_due(loop: Loop, time: Time) -> None:
    done: List[str] = []
    loop.after("late", 5.0, lambda: done.append("late"))
    loop.after("soon", 1.0, lambda: done.append("soon"))
    loop.after("soon", 2.0, lambda: done.append("replaced"))
    loop.run_once(0.0)
    assert done == [] and loop.is_set("soon")
    time.now_s += 2.0
    loop.run_once(60.0)
    assert done == ["replaced"] and not loop.is_set("soon")
    time.now_s += 10.0
    loop.run_once(60.0)
    loop.run_once(0.0)
    assert done == ["replaced", "late"]


def test_descriptors_are_watched_until_they_are_forgotten(loop: Loop) -> None:
    reader, writer = os.pipe()
    done: List[str] = []
    loop.watch(-1, READ, lambda: done.append("none"))
    loop.forget(-1, reader)  # not watched yet
    loop.watch(reader, READ, lambda: done.append("read"))
    loop.watch(reader, READ, lambda: done.append("again"))  # it is watched already
    loop.watch(writer, WRITE, lambda: done.append("write"))
    loop.run_once(60.0)
    assert done == ["write"]
    loop.forget(writer)
    os.write(writer, b"x")
    loop.run_once(60.0)
    assert done == ["write", "read"]
    loop.forget(reader, writer)
    loop.run_once(0.0)
    assert done == ["write", "read"]
    os.close(reader)
    os.close(writer)


def test_other_threads_get_answers_and_errors(loop: Loop) -> None:
    def fail() -> None:
        raise ValueError("no such host")

    with ThreadPoolExecutor() as pool:
        answer, error = pool.submit(loop.ask, lambda: 7, 60.0), pool.submit(loop.ask, fail, 60.0)
        while not (answer.done() and error.done()):
            loop.run_once(0.01)
        assert answer.result() == 7
        with pytest.raises(ValueError, match="no such host"):
            error.result()
