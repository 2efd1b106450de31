"""The agent of a host, as a program: commands go in over stdin, and frames come out."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import pytest

from ringcomm.clock import Deadline
from ringrun.agent import framing
from ringrun.agent.framing import CODE, EVENT, FILE, STDERR, STDOUT
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.reach.agent_process import AgentLink
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import BOOT, Frame
from ringrun.ship.contents import Package
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


def test_output_and_ends_of_ranks_are_reported(start: Callable[..., Agent]) -> None:
    program = "echo $RANK of $WORLD_SIZE at $MORE; echo note >&2; exit $RANK"
    agent = start("sh", "-c", program, np=2, threads="none")
    ready = agent.event("ready")
    assert ready["limits"]["ranks"] == 2 and ready["port"] > 0
    assert [item["event"] for item in agent.events] == ["ready"], "no rank runs before the launcher says so"
    agent.send(*({"do": "go", "env": {"MORE": text}} for text in ("once", "twice")), {"do": "nothing"})
    agent.dismiss()
    for rank in range(2):
        assert agent.data(STDOUT, rank) == b"%d of 2 at once\n" % rank
        assert agent.data(STDERR, rank) == b"note\n"
        end = agent.event("exit", rank)
        assert (end["code"], end["signal"], end["sent"]) == (rank, None, 0)
        assert agent.event("started", rank)["pid"] > 0


def test_a_package_that_the_host_does_not_have_is_asked_for(
    start: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agent = start("sh", "-c", "echo $PYTHONPATH")
    agent.event("ready")
    package = Package("one more", {"one_more.py": b"x = 1\n"})
    agent.send({"do": "use", "package": package.digest})
    agent.event("lacks")
    agent.link.send_frame(framing.PACKAGE, package.archive)
    agent.until(lambda: [item["event"] for item in agent.events] == ["ready", "lacks", "ready"])
    agent.send(GO, {"do": "use", "package": "too late"})
    agent.dismiss()
    first = agent.data(STDOUT).decode().split(":")[0].strip()
    assert Path(first, "one_more.py").read_text() == "x = 1\n"


def test_files_are_sent_there_and_back(
    start: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the launcher reads at once."""
    content = b"#!/bin/sh\nmkdir out\nhead -c 2000000 /dev/zero >out/large\necho 1 >out/small\n>no\n"
    digest = sha256(content).hexdigest()[:32]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = [["run.sh", digest, True]]
    agent = start("sh", "-c", "./run.sh", code=files, folder="job-0", fetch=["out/*"])
    assert agent.event("lacks")["files"] == [digest]
    agent.link.send_frame(CODE, Package("files", {digest: content}).archive)
    agent.go()
    agent.event("exit", 0)
    agent.dismiss()
    pieces = [frame.data.partition(b"\n") for frame in agent.frames if frame.kind == FILE]
    sizes: Dict[str, int] = {}
    for line, _, piece in pieces:
        facts = json.loads(line.decode())
        assert facts["offset"] == sizes.get(facts["path"], 0)
        sizes[facts["path"]] = facts["offset"] + len(piece)
    assert sizes == {"out/large": 2_000_000, "out/small": 2}
    assert agent.events[-1]["event"] == "done"


# ---- ends ---------------------------------------------------------------------------------------------


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
