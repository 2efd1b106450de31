"""What an agent sends: the output of pipes, and the records of ranks, with real processes."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from ringrun.agent import framing as module
from ringrun.agent.framing import (
    MARKER,
    PAUSE_BYTES,
    RECORD,
    RESUME_BYTES,
    STDERR,
    STDOUT,
    Output,
    Recorder,
    queued_s,
)
from ringrun.reach.protocol import Frame, FrameReader


class Agent:
    """The part of an agent that writes, with its stdout as a pipe that this process reads."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.stdout, self.writable = os.pipe()
        for descriptor in (self.stdout, self.writable):
            os.set_blocking(descriptor, False)
        self.gone = 0
        self.output = Output(self.selector, self._on_gone)
        self.reader = FrameReader()
        self.reader.feed(MARKER)

    def _on_gone(self) -> None:
        self.gone += 1
        self.output.close()

    def turn(self, limit_s: float = 0.0) -> None:
        for key, _ in self.selector.select(limit_s):
            key.data()

    def frames(self) -> List[Frame]:
        """Return what the launcher has received by now."""
        try:
            return self.reader.feed(os.read(self.stdout, 1 << 20))
        except BlockingIOError:
            return []


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent whose descriptor 1 is a pipe: ``os.write(1, ...)`` and the selector's key go there."""
    made = Agent()
    write, register, unregister = os.write, made.selector.register, made.selector.unregister
    table = made.selector.get_map

    def of(descriptor: int) -> int:
        return made.writable if descriptor == 1 else descriptor

    monkeypatch.setattr(module.os, "write", lambda fd, data: write(of(fd), data))
    monkeypatch.setattr(made.selector, "register", lambda fd, *more: register(of(fd), *more))
    monkeypatch.setattr(made.selector, "unregister", lambda fd: unregister(of(fd)))
    watched = lambda: {1 if fd == made.writable else fd: key for fd, key in table().items()}  # noqa: E731
    monkeypatch.setattr(made.selector, "get_map", watched)
    yield made
    made.selector.close()
    for descriptor in (made.stdout, made.writable, *made.output.pipes):
        try:
            os.close(descriptor)
        except OSError:
            continue  # a test has closed it


def pipe_of(agent: Agent, kind: int, rank: int) -> Tuple[int, int]:
    reader, writer = os.pipe()
    agent.output.add(reader, kind, rank)
    return reader, writer


def test_a_launcher_that_reads_slowly_is_not_flooded(agent: Agent) -> None:
    """Nothing more is read from the ranks while too much is unsent, and nothing is lost."""
    _, writer = pipe_of(agent, STDOUT, 0)
    os.set_blocking(writer, False)
    sent = received = 0
    while not agent.output.paused:
        try:
            sent += os.write(writer, b"x" * 65536)
        except BlockingIOError:
            pass
        agent.turn()
        agent.output.flush()
    assert len(agent.output.unsent) > PAUSE_BYTES
    added, other = pipe_of(agent, STDERR, 0)  # of a process that starts meanwhile
    os.write(other, b"warning\n")
    agent.turn()
    assert b"warning" not in agent.output.unsent
    last = b""
    while received < sent or last != b"warning\n":
        for frame in agent.frames():
            last = frame.data if frame.kind == STDERR else last
            received += len(frame.data) if frame.kind == STDOUT else 0
        agent.turn()
    assert not agent.output.paused and received == sent
    os.close(writer)
    os.close(other)
    agent.turn()
    assert not agent.output.pipes and len(agent.output.unsent) < RESUME_BYTES


def test_nothing_is_sent_to_a_launcher_that_is_lost(agent: Agent) -> None:
    _, writer = pipe_of(agent, STDOUT, 0)
    agent.output.send(STDOUT, 0, b"x" * (PAUSE_BYTES + 1))
    os.close(agent.stdout)
    agent.output.flush()
    assert agent.gone == 1 and agent.output.lost and not agent.output.paused and not agent.output.unsent
    os.write(writer, b"more")
    agent.turn()  # it is still read, so that the rank does not wait for ever
    os.close(writer)
    agent.turn()
    assert not agent.output.pipes and not agent.output.unsent


RANK = """
import faulthandler, os, signal, socket, sys, time
ours, stacks = (int(item.split(":")[0]) for item in os.environ["RINGCOMM_FLIGHT_FD"].split(","))
sock = socket.socket(fileno=ours)
how = sys.argv[1]
if how != "without":
    if how == "handler":
        faulthandler.register(signal.SIGUSR1, stacks)
    sock.sendall(b'{"type":"hello","signal":%s}\\n' % (b"true" if how == "handler" else b"false"))
print("ready", flush=True)
while how == "computes":
    pass
while how == "answers":
    asked = sock.recv(1)
    kind = b"numbers" if asked == b"#" else b"record"
    how = "has answered" if asked == b"?" else how
    sock.sendall(b'{"type":"%s","asked":true}\\n' % kind)
sys.stdin.read()
"""


class Host:
    """Recorders, and the ranks that they watch."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.records: List[Tuple[int, Dict[str, Any]]] = []
        self.numbers: List[int] = []
        self.dumps = 0
        self.recorders: Dict[int, Recorder] = {}
        self.ranks: Dict[int, subprocess.Popen[str]] = {}

    def send(self, kind: int, rank: int, data: bytes) -> None:
        if kind == RECORD:
            self.records.append((rank, json.loads(data)))
        else:
            self.numbers.append(rank)

    def event(self, name: str) -> None:
        self.dumps += 1

    def start(self, rank: int, how: str) -> subprocess.Popen[str]:
        env = dict(os.environ)
        recorder = self.recorders[rank] = Recorder(rank, env, self.selector, self)  # type: ignore[arg-type]
        descriptors = recorder.ends
        process = self.ranks[rank] = subprocess.Popen(
            [sys.executable, "-c", RANK, how], env=env, pass_fds=descriptors, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        for descriptor in descriptors:
            os.close(descriptor)
        recorder.pid = process.pid
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        self.until(lambda: how == "without" or recorder.answers)
        return process

    def be_late(self, rank: int) -> None:
        """The time limit of a rank's answer is over."""
        assert self.recorders[rank].due is not None
        self.recorders[rank].due = time.monotonic()

    def due(self) -> List[float]:
        return [item.due for item in self.recorders.values() if item.due is not None]

    def ask(self) -> None:
        for item in self.recorders.values():
            item.ask()

    def until(self, reached: Callable[[], bool]) -> None:
        """Serve the descriptors and the deadlines until something has come about."""
        limit_s = time.monotonic() + 60.0
        while not reached():
            assert time.monotonic() < limit_s
            due = min(self.due(), default=time.monotonic() + 1.0)
            for key, _ in self.selector.select(max(0.0, min(1.0, due - time.monotonic()))):
                key.data()
            for item in self.recorders.values():
                item.act(time.monotonic())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(module, "ANSWER_S", 60.0)  # tests end it themselves, see be_late()
    made = Host()
    yield made
    for rank, process in made.ranks.items():
        process.kill()
        process.communicate()
        if rank in made.recorders:
            made.recorders[rank].end()
    assert not made.selector.get_map(), "every descriptor is closed"
    made.selector.close()


def test_ranks_answer_and_those_without_ringcomm_are_reported_as_silent(host: Host) -> None:
    host.start(0, "answers")
    host.start(1, "without")
    host.ask()
    host.be_late(1)
    host.until(lambda: len(host.records) == 2)
    found = dict(host.records)
    assert found[0] == {"type": "record", "asked": True}
    assert (found[1]["reason"], found[1]["pid"], found[1]["stacks"]) == ("silent", host.ranks[1].pid, "")
    assert found[1]["state"] == "absent"
    assert host.due() == []


def test_only_ranks_that_answer_are_asked_for_numbers(host: Host) -> None:
    host.start(0, "without")
    host.start(1, "answers")
    for recorder in host.recorders.values():
        recorder.ask_numbers()
    host.until(lambda: bool(host.numbers))
    assert host.numbers == [1] and host.records == [] and host.due() == []


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_a_rank_that_gets_no_processor_is_starved(host: Host) -> None:
    shared = [host.start(rank, "computes").pid for rank in range(4)]
    for pid in shared:
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})
    host.ask()
    began_s, before_s = time.monotonic(), queued_s(shared[0])
    host.until(lambda: queued_s(shared[0]) - before_s > 0.6 * (time.monotonic() - began_s + 0.05))
    host.be_late(0)
    host.until(lambda: bool(host.records))
    assert [(rank, record["reason"], record["state"]) for rank, record in host.records] == [
        (0, "silent", "starved")
    ]


def test_a_rank_without_a_handler_is_not_killed(host: Host) -> None:
    """It has told of a handler, and the program has replaced it since."""
    process = host.start(0, "silent")
    host.recorders[0].has_handler = True
    host.ask()
    host.be_late(0)
    host.until(lambda: bool(host.records))
    assert process.poll() is None and host.records[0][1]["reason"] == "silent"


def test_what_a_rank_has_sent_before_its_end_is_read(host: Host) -> None:
    process = host.start(0, "answers")
    host.ask()
    process.communicate()  # it has answered, and ended
    assert host.records == []
    host.recorders.pop(0).end()
    assert host.records == [(0, {"type": "record", "asked": True})]
    assert host.due() == [] and not host.selector.get_map()
