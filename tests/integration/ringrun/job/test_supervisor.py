"""The supervisor of a job and its links, with hosts that are commands of this machine, and shell programs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

import pytest

from ringcomm.clock import Deadline
from ringrun.agent.processes import available_cores
from ringrun.job import supervise
from ringrun.job.agents import END, FORCE_S, LINGER_S, Agents, Loop
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob, Job
from ringrun.plan.options import Options
from ringrun.reach import base
from ringrun.reach.protocol import AgentLink, Frame
from tests.integration.ringrun.job.supervised import STAYS, Rendezvous, Running, notice, shell_job


@pytest.fixture
def job(runtime: Path, tmp_path: Path) -> Callable[..., Job]:
    """`job(program, **options)`: a job whose ranks run a shell program."""
    return partial(shell_job, tmp_path)


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


# ---- links to hosts with programs that are no agents; the test sets the clock --------------------


LIMIT_S = 60.0
ANSWERS = r"printf '\nringrun-agent/1\n'; "
READS = "cat >/dev/null; exit 0"
SLEEPS = "exec sleep 1000"


class Handler:
    """Keeps the links' reports."""

    def __init__(self) -> None:
        self.policy = self
        self.again = False  # links that have ended are started again
        self.frames: List[Frame] = []
        self.chatter = b""
        self.confusion: List[str] = []
        self.problems: List[str] = []
        self.ended: List[Optional[int]] = []  # the status of each link's process

    def received(self, host: HostJob, frame: Frame) -> None:
        self.frames.append(frame)

    def chattered(self, host: HostJob, data: bytes) -> None:
        self.chatter += data

    def confused(self, host: HostJob, why: str) -> None:
        self.confusion.append(why)

    def problem(self, host: HostJob, text: str) -> None:
        self.problems.append(text)

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        self.ended.append(status)
        return self.again


class Started:
    """Links to hosts that run a program each; the time passes when a test lets it."""

    def __init__(self, job: Job) -> None:
        self.now_s = 100.0
        self.loop = Loop(lambda: self.now_s)
        self.handler = Handler()
        self.agents = Agents(job, self.loop, self.handler)

    @property
    def links(self) -> List[AgentLink]:
        return self.agents.links

    def turn(self, reading: bool = True, limit_s: float = 0.05) -> None:
        self.agents.go_on(reading)
        self.loop.run_once(limit_s)
        self.agents.look()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline(LIMIT_S)
        while not condition():
            assert not deadline.expired(), vars(self.handler)
            self.turn()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.turn(limit_s=0.0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Started]]:
    """`start(*programs)`: links to one host for each of these shell programs."""
    monkeypatch.setattr(base, "find_local", lambda specs, **_: [False] * len(specs))
    made: List[Started] = []

    def begin(*programs: str, argv: Tuple[str, ...] = (), is_local: bool = False) -> Started:
        names = ",".join(f"h{number}" for number in range(len(programs)))
        job = prepare(Options(hosts=names, via="reach {host}"), ["true"])
        lines = [argv or ("sh", "-c", program) for program in programs]
        hosts = [replace(host, argv=line, is_local=is_local) for host, line in zip(job.hosts, lines)]
        made.append(Started(replace(job, hosts=hosts)))
        return made[-1]

    yield begin
    for item in made:
        item.agents.force()
        item.loop.close()


def test_a_login_that_is_not_over_is_ended(start: Callable[..., Started]) -> None:
    """No process of the job runs there yet, so nothing has to end in good time."""
    job = start(SLEEPS, ANSWERS + READS)
    job.until(lambda: job.links[1].answered)
    job.agents.stop(END)
    job.until(lambda: 0 in job.agents.closed)
    assert job.handler.ended == [-9] and job.links[1].alive
    job.pass_time(max(after_s for _, after_s in END) + FORCE_S)
    assert job.agents.all_closed and job.handler.ended == [-9], "the other one has not answered in time"


def test_a_connection_that_does_not_end_after_its_agent_is_cut(start: Callable[..., Started]) -> None:
    job = start(ANSWERS + SLEEPS)
    job.until(lambda: job.links[0].answered)
    job.agents.dismiss(job.agents.job.hosts[0])
    assert job.links[0].descriptor("stdin") < 0
    job.turn()
    assert job.links[0].alive
    job.pass_time(LINGER_S)
    job.until(lambda: job.agents.all_closed)
    assert job.handler.ended == [-9]


@pytest.mark.parametrize("is_local", [False, True])
def test_at_the_very_end_everything_is_closed_at_once(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    swept: List[int] = []
    monkeypatch.setattr("ringrun.agent.processes.sweep", lambda job, index: swept.append(index))
    job = start(ANSWERS + SLEEPS, ANSWERS + "exec >&-; " + SLEEPS, is_local=is_local)
    job.until(lambda: job.links[0].answered and job.agents.fading)
    processes = [link.process for link in job.links]
    job.agents.force()
    assert job.agents.all_closed and not job.agents.fading and job.handler.ended == []
    assert [process.poll() for process in processes if process is not None] == [-9, -9]
    assert swept == ([0, 1] if is_local else []), "this machine has no agent any more that would do that"
