"""The agent's ends of the sockets on which ranks report, with real processes: answers, silence, ends."""

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

from ringrun.agent import recorders as module
from ringrun.agent.framing import RECORD
from ringrun.agent.recorders import Recorders, queued_s

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
        self.recorders = Recorders(self.selector, self)  # type: ignore[arg-type]
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
        descriptors = self.recorders.open(rank, env)
        process = self.ranks[rank] = subprocess.Popen(
            [sys.executable, "-c", RANK, how], env=env, pass_fds=descriptors, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        for descriptor in descriptors:
            os.close(descriptor)
        self.recorders.started(rank, process.pid)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        self.until(lambda: how == "without" or self.recorders._recorders[rank].answers)
        return process

    def be_late(self, rank: int) -> None:
        """The time limit of a rank's answer is over."""
        assert self.recorders._recorders[rank].due in self.recorders.due()
        self.recorders._recorders[rank].due = time.monotonic()

    def until(self, reached: Callable[[], bool]) -> None:
        """Serve the descriptors and the deadlines until something has come about."""
        limit_s = time.monotonic() + 60.0
        while not reached():
            assert time.monotonic() < limit_s
            due = min(self.recorders.due(), default=time.monotonic() + 1.0)
            for key, _ in self.selector.select(max(0.0, min(1.0, due - time.monotonic()))):
                key.data()
            self.recorders.act(time.monotonic())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(module, "ANSWER_S", 60.0)  # tests end it themselves, see be_late()
    made = Host()
    yield made
    for rank, process in made.ranks.items():
        process.kill()
        process.communicate()
        if rank in made.recorders._recorders:
            made.recorders.ended(rank)
    assert not made.selector.get_map(), "every descriptor is closed"
    made.selector.close()


def test_ranks_answer_and_those_without_ringcomm_are_reported_as_silent(host: Host) -> None:
    host.start(0, "answers")
    host.start(1, "without")
    host.recorders.ask()
    host.be_late(1)
    host.until(lambda: len(host.records) == 2)
    found = dict(host.records)
    assert found[0] == {"type": "record", "asked": True}
    assert (found[1]["reason"], found[1]["pid"], found[1]["stacks"]) == ("silent", host.ranks[1].pid, "")
    assert found[1]["state"] in ("R", "S", "starved")
    assert host.recorders.due() == []


def test_only_ranks_that_answer_are_asked_for_numbers(host: Host) -> None:
    host.start(0, "without")
    host.start(1, "answers")
    host.recorders.ask_numbers()
    host.until(lambda: bool(host.numbers))
    assert host.numbers == [1] and host.records == [] and host.recorders.due() == []


def test_a_rank_that_does_not_answer_writes_its_stacks(host: Host) -> None:
    host.start(0, "handler")
    recorder = host.recorders._recorders[0]
    host.recorders.ask()
    host.be_late(0)
    host.until(lambda: b"<module>" in recorder.stacks)
    host.be_late(0)
    host.until(lambda: bool(host.records))
    ((rank, record),) = host.records
    assert rank == 0 and record["reason"] == "silent" and "most recent call first" in record["stacks"]
    assert host.dumps == 0, "the stacks were asked for"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_a_rank_that_gets_no_processor_is_starved(host: Host) -> None:
    shared = [host.start(rank, "computes").pid for rank in range(4)]
    for pid in shared:
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})
    host.recorders.ask()
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
    host.recorders._recorders[0].has_handler = True
    host.recorders.ask()
    host.be_late(0)
    host.until(lambda: bool(host.records))
    assert process.poll() is None and host.records[0][1]["reason"] == "silent"


def test_what_a_rank_has_sent_before_its_end_is_read(host: Host) -> None:
    process = host.start(0, "answers")
    host.recorders.ask()
    process.communicate()  # it has answered, and ended
    assert host.records == []
    host.recorders.ended(0)
    assert host.records == [(0, {"type": "record", "asked": True})]
    assert host.recorders.due() == [] and not host.selector.get_map()
    host.recorders.ask()
    host.recorders.ask_numbers()
