"""When a job is started again, and what an attempt gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional

import pytest

from ringrun.diagnosis.first_failure import Cause, Exit
from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.job.restarts import Attempts, attempt_of, is_worthwhile
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


def test_until_it_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    screen: Any = Screen()
    left, numbers, waits = [failure(3), LOST, DONE], [], []

    def run(attempt: Any, started: Any) -> Outcome:
        numbers.append(attempt.attempt)
        return left.pop(0)

    made = Attempts(prepare(Options(np=1), ["true"]), 5, screen, run)
    monkeypatch.setattr(made._interrupted, "wait", waits.append)
    assert made.run() is DONE
    assert numbers == [0, 1, 2] and waits == [1.0, 2.0]
    assert screen.text == (
        "box 3\nringrun: attempt 1 of 6 has failed; the next one starts in 1 s (--restarts 5).\n"
        "box\nringrun: attempt 2 of 6 has failed; the next one starts in 2 s (--restarts 5).\n"
    )


def test_interrupted_while_it_waits() -> None:
    made: List[Attempts] = []
    job = prepare(Options(np=1), ["true"])
    screen: Any = Screen()
    made.append(Attempts(job, 3, screen, lambda *_: failure(3)))
    screen.write = lambda *_: made[0].interrupt(2)
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
