"""What an agent forwards of its ranks' pipes: order, back pressure, ends, a lost launcher."""

from __future__ import annotations

import os
import selectors
from typing import Iterator, List, Tuple

import pytest

from ringrun.agent import framing as module
from ringrun.agent.framing import MARKER, PAUSE_BYTES, RESUME_BYTES, STDERR, STDOUT, Output
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
