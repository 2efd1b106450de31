"""The supervisor of a job, with hosts that are commands of this machine, and programs of a shell."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Callable

import pytest

from ringrun.agent.processes import available_cores
from ringrun.job import supervise
from ringrun.plan.job import Job
from tests.integration.ringrun.job.supervised import STAYS, Rendezvous, Running, notice, shell_job

AGENT = """
import os, struct, sys

os.write(1, b"\\nringrun-agent/1\\n")
for text in sys.argv[1:]:
    data = text.encode()
    os.write(1, struct.pack("!BiI", 4, -1, len(data)) + data + b"\\n")
while os.read(0, 65536):
    pass
"""
"""In place of an agent: sends these events."""
LIMITS = {"threads": 1, "cores": 2.0, "ranks": 1, "kept": {}, "unbound": ""}
READY = {"event": "ready", "port": 7, "limits": LIMITS}


@pytest.fixture
def job(runtime: Path, tmp_path: Path) -> Callable[..., Job]:
    """`job(program, **options)`: a job whose ranks run a shell program."""
    return partial(shell_job, tmp_path)


def test_the_ranks_get_the_address_of_the_rendezvous(job: Callable[..., Job]) -> None:
    rendezvous = Rendezvous()
    running = Running(job("echo $RINGCOMM_RENDEZVOUS"), rendezvous)
    assert running.run().exit_code == 0
    assert running.console.lines == [f"[localhost:{rank}] 127.0.0.1:7" for rank in range(2)]
    assert rendezvous.events == ["start", "stop"]
    assert sorted(rendezvous.exits) == [(rank, "exit code 0", True) for rank in range(2)]


# ---- hosts that do not start --------------------------------------------------------------------------


def test_a_host_that_does_not_start_ends_the_job(job: Callable[..., Job]) -> None:
    fails = ["sh", "-c", "echo access is denied >&2; exit 9"]
    running = Running(job("echo started", hosts="a,b", argv=fails))
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason) == (1, "start")
    assert "access is denied" in outcome.report and "ringrun doctor -H a,b" in outcome.report
    assert "started" not in running.console.text


def test_a_number_of_slots_that_looks_like_a_port_is_refused(job: Callable[..., Job]) -> None:
    slots = next(number for number in (22, 2222) if number > available_cores())
    outcome = Running(job("echo up", hosts=f"me@a:{slots},b")).run()
    assert outcome.reason == "start" and f"write me@a:1@{slots}" in outcome.report, outcome.report


def test_each_host_has_a_short_time_to_report_what_it_lacks(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them does not answer at all; the job does not wait for it until the start timeout."""
    monkeypatch.setattr("ringrun.job.ranks.GATHER_S", 0.2)
    outcome = Running(job("true", hosts="a,b", argv=["sleep", "1000"], cwd=(f"b={tmp_path}/gone",))).run()
    assert outcome.reason == "start" and f"{tmp_path}/gone" in outcome.report


def test_a_host_that_says_what_it_may_not_ends_the_job_in_order(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    argv = [sys.executable, "-c", AGENT, json.dumps(READY), json.dumps(READY)]
    running = Running(job("exec sleep 1000", hosts="a,localhost", argv=argv))
    outcome = running.run()
    text = " ".join(f"{running.console.text}\n{outcome.report}".replace("│", " ").split())
    why = "a: its agent sent invalid data: an event 'ready' once more than it may occur."
    assert outcome.exit_code and text.count(why) == 1


# ---- while the job runs -------------------------------------------------------------------------------


def test_a_host_that_is_lost_has_failed(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    rendezvous = Rendezvous()
    program = "[ $RANK = 1 ] && kill -9 $PPID; exec sleep 1000"
    running = Running(job(program, hosts="a,localhost"), rendezvous)
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason) == (255, "failure")
    assert outcome.cause is not None and outcome.cause.host_index == 1 and "localhost" in outcome.report
    assert (1, "lost with its host", False) in rendezvous.exits


def test_a_cut_connection_is_named_by_the_rendezvous(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    rendezvous = Rendezvous()
    running = Running(job(STAYS), rendezvous)

    def cut() -> None:
        rendezvous.notify(notice("up", detail={"links": ()}))
        detail = {"kind": "cut", "leaving": True}
        rendezvous.notify(notice("failed", "the network between a and b", culprit=1, detail=detail))

    monkeypatch.setattr(supervise, "LEAVING_S", 0.1)
    running.once(cut, "up 0", "up 1")
    outcome = running.run()
    assert outcome.reason == "failure" and "the network between a and b" in outcome.report
    assert outcome.exit_code == 255


def test_files_come_back_from_the_hosts(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "data").write_text("given\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    running = Running(job("cp data result", hosts="a", ship=".", fetch=("result",)))
    assert running.run().exit_code == 0
    assert (folder / "fetched" / "a" / "result").read_text() == "given\n"
    assert "fetched 1 file, 0.0 MB, from a into fetched/a" in running.console.text


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
