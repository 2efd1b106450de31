"""The agent of a host, as a program; and the processes of a job that are really there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import pytest

from ringcomm.clock import Deadline
from ringrun.agent import processes
from ringrun.agent.framing import EVENT, STDOUT
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import BOOT, AgentLink, Frame
from tests.support.service import eventually

LIMIT_S = 60.0
GO: Dict[str, Any] = {"do": "go", "env": {}}
TERM_IS_ENOUGH: Dict[str, Any] = {"do": "stop", "steps": [[15, 0.0], [9, 60.0]]}


class Agent:
    """A running agent of a job with this command; `config` replaces fields of the job on this host."""

    def __init__(
        self, argv: Sequence[str], np: int = 1, payload: Optional[bytes] = None, **config: Any
    ) -> None:
        job = prepare(Options(np=np), argv)
        self.frames: List[Frame] = []
        self.link = AgentLink([sys.executable, "-c", BOOT])
        given = {**job.agent_config(job.hosts[0]), "payload": payload is not None, **config}
        self.link.start(given, payload)

    @property
    def events(self) -> List[Dict[str, Any]]:
        """The facts of all events, with their rank."""
        return [
            {"rank": frame.rank, **event_facts(frame.data)} for frame in self.frames if frame.kind == EVENT
        ]

    def data(self, kind: int, rank: int = 0) -> bytes:
        return b"".join(frame.data for frame in self.frames if (frame.kind, frame.rank) == (kind, rank))

    def turn(self) -> None:
        """Exchange what is there, or wait a moment."""
        self.link.write()
        if select.select([self.link.descriptor("stdout")], [], [], 0.05)[0]:
            self.frames += self.link.read()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = Deadline(LIMIT_S)
        while not condition():
            assert self.link.alive and not deadline.expired(), (self.events, self.said())
            self.turn()

    def said(self) -> str:
        self.link.drain_stderr()
        return self.link.stderr_text

    def go(self) -> Agent:
        """Start the ranks when it is ready."""
        self.event("ready")
        self.send(GO)
        return self

    def event(self, name: str, rank: int = -1) -> Dict[str, Any]:
        """Wait for an event; its facts."""
        self.until(lambda: self._found(name, rank))
        return self._found(name, rank)[0]

    def _found(self, name: str, rank: int) -> List[Dict[str, Any]]:
        return [item for item in self.events if (item["event"], item["rank"]) == (name, rank)]

    def send(self, *commands: Dict[str, Any]) -> None:
        for command in commands:
            self.link.send(command)

    def wait_for_end(self) -> int:
        """Its exit code, after all that it has written."""
        deadline = Deadline(LIMIT_S)
        while self.link.alive:
            assert not deadline.expired(), (self.events, self.said())
            self.turn()
        assert self.link.process is not None
        return self.link.process.wait(LIMIT_S)

    def dismiss(self) -> None:
        """As the launcher does when the agent has reported ``done``."""
        self.event("done")
        self.link.close_stdin()
        assert self.wait_for_end() == 0 and self.said() == ""


@pytest.fixture
def start() -> Iterator[Callable[..., Agent]]:
    made: List[Agent] = []

    def begin(*argv: str, **more: Any) -> Agent:
        made.append(Agent(argv, **more))
        return made[-1]

    yield begin
    for agent in made:
        agent.link.kill()
        agent.link.close()


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> signum - 1 & 1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("way", ["stdin", "terminated", pytest.param("silence", marks=pytest.mark.full)])
def test_an_agent_that_loses_its_launcher_ends_its_ranks(start: Callable[..., Agent], way: str) -> None:
    agent = start("sh", "-c", "echo $$; exec sleep 1000", silence_s=3.0 if way == "silence" else None).go()
    agent.until(lambda: agent.send({"do": "numbers"}) or agent.data(STDOUT))  # not silent yet
    pid = int(agent.data(STDOUT))
    assert is_running(pid) and agent.link.process is not None
    if way == "stdin":
        agent.link.close_stdin()
    elif way == "terminated":
        guard = agent.link.process.pid
        assert eventually(lambda: catches(guard, signal.SIGTERM), LIMIT_S)
        os.kill(guard, signal.SIGTERM)  # which passes it on
    assert agent.wait_for_end() == 0
    assert eventually(lambda: not is_running(pid), LIMIT_S)
    assert "done" not in [item["event"] for item in agent.events]


def test_an_agent_that_is_signalled_with_its_launcher_reports_all(start: Callable[..., Agent]) -> None:
    """As by a scheduler, which sends SIGTERM to all processes of a job."""
    saves = "trap 'sleep 0.2; echo saved; exit 5' TERM; echo up; while :; do sleep 0.02; done"
    agent = start("sh", "-c", saves).go()
    agent.until(lambda: agent.data(STDOUT))
    assert agent.link.process is not None
    guard = agent.link.process.pid
    assert eventually(lambda: catches(guard, signal.SIGTERM), LIMIT_S)
    os.kill(guard, signal.SIGTERM)
    agent.send(TERM_IS_ENOUGH)
    agent.dismiss()
    assert agent.data(STDOUT) == b"up\nsaved\n" and agent.event("exit", 0)["code"] == 5


SLEEP = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def started() -> Iterator[List[subprocess.Popen[bytes]]]:
    made: List[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def begin(started: List[subprocess.Popen[bytes]], program: str = SLEEP, **variables: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **variables}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    started.append(process)
    return process


def ready(process: Any) -> Any:
    assert process.stdout.readline() == b"here\n"
    return process


def test_processes_of_a_job_on_a_host_are_found_and_ended(started: List[subprocess.Popen[bytes]]) -> None:
    job = uuid.uuid4().hex
    both = [
        ready(begin(started, RINGCOMM_JOB=job, RINGCOMM_SLOT=f"1:{local}")) for local in range(2)
    ]  # fmt: skip
    ready(begin(started, RINGCOMM_JOB=job, RINGCOMM_SLOT="11:0"))  # of another host
    ready(begin(started, RINGCOMM_JOB="other", RINGCOMM_SLOT="1:0"))
    assert processes.strays(job, 1) == sorted(process.pid for process in both)
    assert processes.strays("none", 1) == []
    processes.kill([both[0].pid, 1 << 30], signal.SIGTERM)
    assert both[0].wait(60) == -signal.SIGTERM
    assert processes.strays(job, 1) == [both[1].pid], "one that has ended is not counted"
    processes.sweep(job, 1, limit_s=60.0)
    assert both[1].wait(60) == -signal.SIGKILL
    processes.sweep(job, 1, limit_s=0.0)


def test_all_descendants_are_found_whatever_their_environment(
    started: List[subprocess.Popen[bytes]],
) -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={})"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}, {SLEEP!r}])"
    process = ready(begin(started, program))
    found = processes.strays("none", 0, process.pid)
    assert len(found) == 2 and process.pid not in found
    processes.sweep("none", 0, process.pid, limit_s=60.0)
    assert process.wait(60) == 0
    assert processes.strays("none", 0, process.pid) == []


# ---- the launcher's end of a process that is not an agent ----------------------------------------


READS_ALL = "import sys; data = sys.stdin.buffer.read(); sys.stderr.write(str(len(data)))"
READS_NOTHING = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture
def linked() -> Iterator[Callable[..., AgentLink]]:
    """`linked(program)`: a link to a Python that runs this program."""
    links = []

    def start(program: str, payload: bytes = b"") -> AgentLink:
        links.append(AgentLink([sys.executable, "-c", program]))
        links[-1].start({"ranks": [0]}, payload or None)
        return links[-1]

    yield start
    for link in links:
        link.kill()
        link.close()


def test_all_that_is_queued_arrives(linked: Callable[..., AgentLink]) -> None:
    link = linked(READS_ALL, b"x" * 3_000_000)
    queued = sum(view.nbytes for view in link._outgoing)
    while link.has_outgoing:
        select.select([], [link.descriptor("stdin")], [], 10.0)
        link.write()
    link.close_stdin()
    assert link.process is not None and link.process.stderr is not None
    link.process.wait(20.0)
    assert link.process.stderr.read() == str(queued).encode()
    assert queued > 3_000_000


def test_a_process_that_does_not_read_is_killed_with_its_group(linked: Callable[..., AgentLink]) -> None:
    link = linked(READS_NOTHING, b"x" * 3_000_000)
    assert link.process is not None
    link.write()
    assert link.has_outgoing
    link.kill()
    assert link.process.wait(20.0) == -signal.SIGKILL
    link.kill()  # again, which has no effect
    link.close()
    assert link.at_end and [link.descriptor(name) for name in ("stdin", "stdout", "stderr")] == [-1] * 3


def test_a_process_that_has_ended_takes_nothing(linked: Callable[..., AgentLink]) -> None:
    """Its end is reported by reading, so writing is no error."""
    link = linked("pass", b"x" * 3_000_000)
    assert link.process is not None
    link.process.wait(20.0)
    assert link.has_outgoing
    link.write()
    assert not link.has_outgoing and link.read() == [] and link.at_end and link.poll() == 0
