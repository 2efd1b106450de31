"""The supervisor's links to its hosts with programs that are no agents; the test sets the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator, List, Optional, Tuple

import pytest

from ringcomm.clock import Deadline
from ringrun.job.agents import END, FORCE_S, LINGER_S, Agents, Loop
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob, Job
from ringrun.plan.options import Options
from ringrun.reach import base
from ringrun.reach.base import MAX_DELAY_S
from ringrun.reach.protocol import AgentLink, Frame

LIMIT_S = 60.0
ANSWERS = r"printf '\nringrun-agent/1\n'; "
READS = "cat >/dev/null; exit 0"
STAYS = "exec sleep 1000"


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


def test_a_host_is_tried_again_after_a_while(start: Callable[..., Started]) -> None:
    job = start("exit 3")
    job.handler.again = True
    job.until(lambda: job.loop.is_set("retry 0"))
    assert job.links[0].attempt == 1 and not job.agents.all_closed and not job.agents.fading
    job.handler.again = False
    job.pass_time(2 * MAX_DELAY_S)
    job.until(lambda: job.agents.all_closed)
    assert job.links[0].attempt == 2 and job.handler.ended == [3, 3]


def test_a_login_that_is_not_over_is_ended(start: Callable[..., Started]) -> None:
    """No process of the job runs there yet, so nothing has to end in good time."""
    job = start(STAYS, ANSWERS + READS)
    job.until(lambda: job.links[1].answered)
    job.agents.stop(END)
    job.until(lambda: 0 in job.agents.closed)
    assert job.handler.ended == [-9] and job.links[1].alive
    job.pass_time(max(after_s for _, after_s in END) + FORCE_S)
    assert job.agents.all_closed and job.handler.ended == [-9], "the other one has not answered in time"


def test_a_connection_that_does_not_end_after_its_agent_is_cut(start: Callable[..., Started]) -> None:
    job = start(ANSWERS + STAYS)
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
    job = start(ANSWERS + STAYS, ANSWERS + "exec >&-; " + STAYS, is_local=is_local)
    job.until(lambda: job.links[0].answered and job.agents.fading)
    processes = [link.process for link in job.links]
    job.agents.force()
    assert job.agents.all_closed and not job.agents.fading and job.handler.ended == []
    assert [process.poll() for process in processes if process is not None] == [-9, -9]
    assert swept == ([0, 1] if is_local else []), "this machine has no agent any more that would do that"
