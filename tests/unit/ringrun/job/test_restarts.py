"""When a job is started again, and what an attempt gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Optional

import pytest

from ringrun.diagnosis.first_failure import Cause, Exit
from ringrun.elastic.job import ElasticJob
from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.job.restarts import Attempts, attempt_of, is_worthwhile, wait_s
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options


def failure(code: Optional[int] = 1, reason: str = "failure") -> Outcome:
    cause = Cause(0, None, "exit code", "", code or 137, Exit(0, code, None if code else 9))
    return Outcome(code or 137, f"box {code}\n", reason, cause)


DONE = Outcome(0, "", "done")
LOST = Outcome(255, "box\n", "failure", Cause(None, 1, "gone", "", 255))


class Screen:
    """Takes what is shown."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, stream: int, data: bytes) -> None:
        assert stream == 2
        self.text += data.decode()


def attempts(restarts: int, *outcomes: Outcome, wait: Optional[Callable[[float], Any]] = None) -> Any:
    """Return how it ended, the jobs that were run, what was shown, and how long was waited."""
    job = prepare(Options(np=1), ["true"])
    left, jobs, waits, screen = list(outcomes), [], [], Screen()

    def run(attempt: Any, started: Any) -> Outcome:
        jobs.append(attempt)
        return left.pop(0)

    made: Any = Attempts(job, restarts, screen, run, wait or waits.append)  # type: ignore[arg-type]
    return made.run(), jobs, screen.text, waits, made


@pytest.mark.parametrize(
    ("outcome", "attempt", "again"),
    [
        (failure(), 0, True),
        (failure(None), 3, True),
        (LOST, 0, True),
        (failure(2), 0, False),
        (DONE, 0, False),
        (Outcome(130, "", "interrupt"), 0, False),
        (Outcome(141, "", "pipe"), 0, False),
        (Outcome(1, "box", "start"), 0, False),
        (Outcome(1, "box", "start"), 1, True),
    ],
)
def test_whether_it_is_worthwhile(outcome: Outcome, attempt: int, again: bool) -> None:
    assert is_worthwhile(outcome, attempt) is again


def test_until_it_ends_well() -> None:
    outcome, jobs, shown, waits, _ = attempts(5, failure(3), LOST, DONE)
    assert outcome is DONE
    assert [job.attempt for job in jobs] == [0, 1, 2]
    assert waits == [1.0, 2.0]
    assert shown == (
        "box 3\nringrun: attempt 1 of 6 has failed; the next one starts in 1 s (--restarts 5).\n"
        "box\nringrun: attempt 2 of 6 has failed; the next one starts in 2 s (--restarts 5).\n"
    )


def test_no_more_often_than_allowed() -> None:
    last = failure(4)
    outcome, jobs, shown, _, _ = attempts(1, failure(3), last)
    assert outcome is last and len(jobs) == 2
    assert "box 4" not in shown, "the last box is the caller's to show"
    outcome, jobs, shown, _, _ = attempts(0, last)
    assert outcome is last and len(jobs) == 1 and shown == ""


def test_interrupted_while_it_waits() -> None:
    made: List[Attempts] = []
    job = prepare(Options(np=1), ["true"])
    screen: Any = Screen()
    made.append(Attempts(job, 3, screen, lambda *_: failure(3), lambda _: made[0].interrupt(2)))
    outcome = made[0].run()
    assert (outcome.reason, outcome.exit_code, outcome.report) == ("interrupt", 130, "")


def test_interrupted_while_a_failed_attempt_ends() -> None:
    made: List[Attempts] = []
    job = prepare(Options(np=1), ["true"])
    screen: Any = Screen()

    def run(*_: Any) -> Outcome:
        made[0].interrupt(2)
        return failure(3)

    made.append(Attempts(job, 3, screen, run))
    assert made[0].run().report == "box 3\n"
    assert screen.text == ""


def test_waits_grow_up_to_a_limit() -> None:
    assert [wait_s(attempt) for attempt in (0, 1, 2, 3, 4, 5, 60)] == [1, 2, 4, 8, 16, 30, 30]


def test_an_attempt_is_a_job_of_its_own() -> None:
    job = prepare(Options(np=2, output_dir="logs"), ["true"])
    first, second = attempt_of(job, 0, 1), attempt_of(job, 1, 1)
    assert len({first.id, second.id, job.id}) == 3
    assert len({first.key, second.key, job.key}) == 3
    assert second.output_dir == Path("logs/attempt.1")
    assert attempt_of(job, 0, 0).output_dir == Path("logs")
    assert [item.agent_config(item.hosts[0])["env"]["RINGCOMM_RESTART"] for item in (first, second)] == [
        "0",
        "1",
    ]


class Running:
    """Records what it is told, in place of a supervisor."""

    def __init__(self) -> None:
        self.told: List[Any] = []

    def interrupt(self, signum: int) -> None:
        self.told.append(signum)

    def diagnose(self) -> None:
        self.told.append("diagnose")


def test_signals_reach_the_attempt_that_runs() -> None:
    running: Any = Running()
    made: List[Attempts] = []

    def run(_: Any, started: Callable[[Any], None]) -> Outcome:
        made[0].diagnose()  # it is not there yet
        started(running)
        made[0].diagnose()
        made[0].interrupt(15)
        return Outcome(143, "", "interrupt")

    screen: Any = Screen()
    made.append(Attempts(prepare(Options(np=1), ["true"]), 3, screen, run))
    assert made[0].run().exit_code == 143
    made[0].diagnose()  # it is over
    assert running.told == ["diagnose", 15]
    assert made[0].signum == 15


def test_an_attempt_of_an_elastic_job_starts_with_its_first_ranks() -> None:
    job = prepare(Options(hosts="localhost:2", min_np=1), ["true"])
    assert isinstance(job, ElasticJob)
    job.open_host(0, HostSpec("localhost"), 2, True)
    again = attempt_of(job, 1, 1)
    assert isinstance(again, ElasticJob) and again.limits == job.limits
    assert (again.hosts, again.plan.hosts) == ([], [])
    assert again.attempt == 1 and again.id != job.id and again.key != job.key
