"""The result of a job, the remarks on it, and its rendezvous' addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Sequence

import pytest

from ringcomm.rendezvous.membership import Notice
from ringrun.diagnosis.first_failure import Exit, FirstFailure
from ringrun.job.launch import prepare
from ringrun.job.outcome import (
    Notices,
    Outcome,
    ended,
    not_started,
    with_changes,
)
from ringrun.plan.environment import from_values
from ringrun.plan.job import Job
from ringrun.plan.options import Options

CHANGES = [(61.0, "rank 1 (far) lost: killed by SIGKILL; going on with 1 rank after 0.5 s")]


def told(names_calls: bool) -> str:
    return "Rank 0 waits."


@pytest.fixture
def job() -> Job:
    """Of three hosts with a rank each."""
    return prepare(Options(hosts="a,me@b,c"), ["true"], {"PATH": "/"})


def failure_of(*exits: Exit) -> FirstFailure:
    failure = FirstFailure()
    for end in exits:
        failure.exited(end)
    return failure


def test_hosts_that_do_not_start_are_listed_with_those_that_are_silent(job: Job) -> None:
    outcome = not_started(job, {1: "b: no route to host\x1b[2J"}, [0])
    assert (outcome.exit_code, outcome.reason, outcome.cause) == (1, "start", None)
    assert "b: no route to host" in outcome.report and "\x1b" not in outcome.report
    assert "ringrun doctor -H a,me@b,c examines these hosts" in outcome.report
    text = " ".join(outcome.report.replace("│", " ").split())
    assert "c" in text.split("no route")[1], "it has not answered"


def test_the_first_failure_is_reported(job: Job) -> None:
    failure = failure_of(Exit(2, 7, None), Exit(0, None, 15, sent=15))
    tails = {2: ["ValueError: bad sample\x07"], 0: []}
    outcome = ended(job, failure, "", 0, tails, told, {"c": "/opt/python"}, "First.")
    assert (outcome.exit_code, outcome.reason) == (7, "failure")
    assert outcome.cause is not None and outcome.cause.rank == 2
    for part in ("First.", "Rank 0 waits.", "ValueError: bad sample", "exit code 7"):
        assert part in outcome.report
    assert "\x07" not in outcome.report
    assert outcome.told == 2


@pytest.mark.parametrize(
    ("rank", "forward", "told"), [(1, (), True), (0, (), False), (1, ("PYTHONPATH",), False)]
)
def test_a_module_may_be_in_a_folder_that_only_this_shell_looks_into(
    monkeypatch: pytest.MonkeyPatch, rank: int, forward: Sequence[str], told: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/home/me/lib")
    job = prepare(Options(hosts="localhost,b", forward=forward), ["true"])
    tail = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'm'"]
    report = ended(job, failure_of(Exit(rank, 1, None)), "", 0, {rank: tail}).report
    assert ("PYTHONPATH is /home/me/lib" in report and "-x PYTHONPATH passes it" in report) is told

# ---- elastic jobs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "title"), [(0, ""), (1, "changed 1 time"), (2, "changed 2 times")])
def test_a_job_that_has_survived_its_failures_succeeds(count: int, title: str) -> None:
    exits = {1: Exit(1, None, 9)}
    outcome = with_changes(Outcome(137, "a box", "failure", None, exits), None, CHANGES * count)
    assert (outcome.exit_code, outcome.reason, outcome.exits) == (0, "done", exits)
    assert title in outcome.report and bool(outcome.report) is bool(count)
    assert outcome.report.count("0:01:01  rank 1 (far) lost") == count


def test_the_box_names_hosts_and_slots_that_were_excluded() -> None:
    changes = [(5.0, "slot 0 of b is excluded: No module named 'torch'"), *CHANGES]
    outcome = with_changes(Outcome(0, "", "done"), None, changes, ["slot 0 of b"])
    assert "the ranks changed 1 time, slot 0 of b was excluded" in outcome.report
    assert "slot 0 of b is excluded: No module named 'torch'" in outcome.report


@pytest.mark.parametrize(("code", "shown"), [(0, 1), (4, 4)])
def test_why_a_job_cannot_continue(code: int, shown: int) -> None:
    outcome = with_changes(Outcome(code, "", "done"), "too few slots\x1b[2J", CHANGES)
    assert (outcome.exit_code, outcome.reason) == (shown, "failure")
    for part in ("the job cannot continue", "too few slots", "0:01:01  rank 1", f"exit code {shown}"):
        assert part in outcome.report
    assert "\x1b" not in outcome.report


class Screen:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: List[str] = []

    def show(self, text: str) -> None:
        self.lines.append(text)


def notices(
    verbose: bool = False, hosts: str = "a,b", command: Sequence[str] = ("true",), **settings: Any
) -> Any:
    values = from_values(settings)
    job = prepare(Options(hosts=hosts, verbose=verbose, setting_values=values), command, {})
    screen: Any = Screen()
    return Notices(job, screen), screen.lines


def test_a_job_that_was_to_be_measured_and_was_not_has_failed() -> None:
    short = "No advice: the program ended without"
    for said, code, shown in (
        ([], 1, [short]),
        ([("slow", "slow")], 1, ["slow", short]),
        ([("advise", "a table")], 0, ["a table"]),
        ([("no advice", "too few steps")], 1, ["too few steps"]),
    ):
        found, lines = notices(advise=True)
        for topic, text in said:
            found.take(Notice("warning", text, detail={"topic": topic}))
        outcome = Outcome(0, "", "done")
        found.conclude(outcome)
        assert outcome.exit_code == code
        there = [line for line in lines if line]
        assert len(there) == len(shown) and all(map(str.startswith, there, shown)), there


def test_ranks_that_join_and_make_no_call_have_trained_alone() -> None:
    found, lines = notices(command=["train.py"])
    found.exited({"joined": True})
    found.conclude(Outcome(0, "", "done"))
    found.conclude(Outcome(0, "", "done"), made_no_call=True)
    assert sum("none made a collective" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "joined", "told"),
    [
        ("import ringcomm as rc\n", False, True),
        ("if True:\n    import horovod.torch as hvd\n", False, True),
        ("import ringcomm as rc\n", True, False),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", False, False),
        ("print(1)\n", False, False),
    ],
)
def test_programs_that_import_ringcomm_and_never_join_have_trained_alone(
    tmp_path: Path, text: str, joined: bool, told: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    found, lines = notices(command=[str(tmp_path / "train.py")])
    for _ in range(2):
        found.exited({"joined": joined})
    found.conclude(Outcome(0, "", "done"))
    assert any("each trained alone" in line for line in lines) is told
