"""How long the ranks have after the first failure, and after the user's signals."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

import pytest

from ringrun.diagnosis.first_failure import Exit
from ringrun.job.agents import Loop
from ringrun.job.supervise import END, GRACE_S, INTERRUPT, KILL, LEAVING_S, SAME_S, Ending, term


class Job:
    """The end of a job; the steps by which its ranks are ended are kept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.exits: Dict[int, Exit] = {}
        self.steps: List[Any] = []
        self.loop = Loop(lambda: self.now_s)
        self.ending = Ending(self.loop, self.exits, self.steps.append)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.loop.run_once(0.0)

    def exit(self, rank: int, signum: int = 0) -> None:
        self.exits[rank] = Exit(rank, None if signum else 1, signum or None, signum)
        self.ending.exited()

    def signal(self, signum: int, has_failed: bool = False) -> str:
        return self.ending.signalled(signum, 30.0, [0, 1], has_failed)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.loop.close()


def test_the_others_have_some_time_after_the_first_failure(job: Job) -> None:
    assert job.ending.after_failure() and not job.ending.after_failure(), "it begins once"
    job.exit(1)
    job.pass_time(GRACE_S / 2)
    assert job.steps == [] and job.ending.reason == ""
    job.pass_time(GRACE_S / 2)
    assert job.steps == [END] and job.ending.reason == "failure"


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_leaving_has_longer_but_not_for_ever(job: Job, ends: bool) -> None:
    job.ending.after_failure()
    job.ending.leaving.add(2)
    job.exit(1)
    job.pass_time(GRACE_S)
    assert job.steps == []
    if ends:
        job.exit(2)
    else:
        job.pass_time(LEAVING_S)
    assert job.steps == [END] and not job.loop.is_set("grace")


@pytest.mark.parametrize(
    ("signals", "steps"),
    [
        (((2, 0.0),), [INTERRUPT]),
        (((2, 0.0), (2, 0.1)), [INTERRUPT, KILL]),
        (((15, 0.0), (15, SAME_S / 2)), [term(30.0)]),
        (((15, 0.0), (1, SAME_S / 2), (15, SAME_S)), [term(30.0), KILL]),
    ],
)
def test_the_second_signal_ends_ranks_at_once_unless_it_is_the_same_request(
    job: Job, signals: Tuple[Tuple[int, float], ...], steps: List[Any]
) -> None:
    lines = []
    for signum, after_s in signals:
        job.now_s += after_s
        lines.append(job.signal(signum))
    assert job.steps == steps and job.ending.reason == "interrupt" and job.ending.signum == signals[0][0]
    assert "ending all ranks on all hosts (once more: at once)" in lines[0] and not any(lines[1:])


@pytest.mark.parametrize(
    ("first", "again_s", "text"),
    [
        (15, 0.0, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (15, 40.0, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (15, 4.04, "killed by the second signal, 4.0 s after SIGTERM, while handling it"),
        (2, 0.0, "killed 3.5 s after SIGINT, while handling it"),
    ],
)
def test_ranks_that_did_not_end_in_time_are_named_once(
    job: Job, first: int, again_s: float, text: str
) -> None:
    job.signal(first)
    if again_s:
        job.now_s += again_s
        job.signal(15)
    job.exit(0, 15)
    job.exit(1, 9)
    assert (job.ending.killed(), job.ending.killed()) == ({text: [1]}, {})
