"""How a user ends a job: by signals, by an exception, and by commands to its control socket."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Callable

import pytest

from ringrun.plan.job import Job
from tests.integration.ringrun.job.supervised import Running, shell_job


@pytest.fixture
def job(runtime: Path, tmp_path: Path) -> Callable[..., Job]:
    """`job(program, **options)`: a job whose ranks run a shell program."""
    return partial(shell_job, tmp_path)


HANDLES = """
fails='Traceback (most recent call last):
OSError: full'
if [ $RANK = 0 ]; then
    sh -c 'trap "touch told; exit" TERM; echo up helper; while :; do sleep 0.02; done' &
    trap 'sleep 0.3; [ -e told ] || echo helper runs; echo "$fails" >&2; exit 1' TERM
    echo up 0
    while :; do sleep 0.02; done
fi
sh -c 'trap "sleep 0.8; echo saved; exit" TERM; echo up 1; while :; do sleep 0.02; done'
true
"""
"""Rank 0 needs its helper to end, and fails; rank 1 is a shell, whose program needs some time to end."""


def test_sigterm_is_for_the_ranks_and_then_for_what_they_run(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it comes twice is no second request: ``timeout`` sends it to ringrun and to its group."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    running = Running(job(HANDLES))

    def end() -> None:
        for _ in range(2):
            running.supervisor.interrupt(15)

    running.once(end, "up 0", "up helper", "up 1")
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason) == (143, "interrupt")
    text = running.console.text
    assert "helper runs" in text and (tmp_path / "told").exists()
    assert "[localhost:1] saved" in text and "OSError: full" in text and "killed" not in text
    assert "(once more: at once); they have 30 s (--grace)" in text


def test_ranks_that_do_not_end_in_time_are_named(job: Callable[..., Job]) -> None:
    stays = "[ $RANK = 1 ] || trap '' TERM; echo up $RANK; while :; do sleep 1000; done"
    running = Running(job(stays, hosts="localhost:3", grace_s=0.3))
    running.once(lambda: running.supervisor.interrupt(15), "up 0", "up 1", "up 2")
    assert running.run().exit_code == 143
    line = "ringrun: ranks 0, 2 on localhost: killed 0.3 s after SIGTERM, while handling it; --grace S gives"
    assert line in running.console.text


def test_a_second_signal_does_not_wait(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringrun.job.supervise.INTERRUPT", ((2, 0.0), (15, 1000.0)))
    running = Running(job("trap '' INT TERM; echo up $RANK; while :; do sleep 1000; done", hosts="localhost"))

    def react(text: str) -> None:
        if "once more" in text:
            running.console.react = lambda text: None
            running.supervisor.interrupt(2)
        elif "up 0" in text and "SIGINT" not in text:
            running.supervisor.interrupt(2)

    running.console.react = react
    outcome = running.run()
    assert outcome.exit_code == 130 and outcome.exits[0].signal == 9


def test_a_job_that_commands_cannot_reach_runs_all_the_same(job: Callable[..., Job], runtime: Path) -> None:
    """It says so where others may have put something in the place of the directory, else if it is verbose."""
    for verbose in (False, True):
        running = Running(job("true", hosts="localhost", settings={"verbose": verbose}))
        (runtime / f"{running.job.id}.sock").mkdir(parents=True)
        assert running.run().exit_code == 0
        assert ("cannot reach this job" in running.console.text) is verbose
    shutil.rmtree(runtime)
    runtime.touch()
    running = Running(job("true", hosts="localhost"))
    assert running.run().exit_code == 0
    assert f"{runtime} is no directory" in running.console.text
