"""The flight recorder of a process and its channel to ringrun: answers, failures, and what is not told."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import socket
import stat
import sys
import threading

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.errors import PeerLostError
from ringcomm.job import flight_recorder as module
from ringcomm.job.flight_recorder import NUMBERS, RECORD, RecorderSocket, forget_what_is_closed
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.support.service import eventually

LIMIT_S = 60.0
SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0)


class Agent:
    """ringrun's end of a channel."""

    def __init__(self):
        self.socket, self.theirs = socket.socketpair()
        self.socket.settimeout(LIMIT_S)
        self.pipe, self.stacks = os.pipe()
        self.lines = self.socket.makefile("rb")
        self.channel = None
        self.before = answering()

    def open(self):
        faulthandler.unregister(signal.SIGUSR1)
        self.channel = RecorderSocket(self.theirs, self.stacks)
        return self.channel

    def next(self):
        return json.loads(self.lines.readline())

    def ask(self, *requests):
        self.socket.sendall(b"".join(requests))

    def threads(self):
        return [thread for thread in answering() if thread not in self.before]

    def hang_up(self):
        self.lines.close()
        self.socket.close()

    def close(self):
        self.hang_up()
        if self.channel is not None:
            atexit.unregister(self.channel._report_end)
            faulthandler.unregister(signal.SIGUSR1)
            assert eventually(lambda: not self.threads())
        self.theirs.close()
        os.close(self.pipe)
        os.close(self.stacks)


def answering():
    return [thread for thread in threading.enumerate() if thread.name == "ringcomm-flight"]


@pytest.fixture
def silent():
    """An agent whose channel is not opened yet."""
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def agent(silent):
    """An agent whose channel has said hello."""
    silent.open()
    assert silent.next() == {"type": "hello", "signal": True}
    return silent


@pytest.fixture
def launched(agent, monkeypatch):
    """An agent to which all ranks of this process report."""
    monkeypatch.setattr(RecorderSocket, "_opened", True)
    monkeypatch.setattr(RecorderSocket, "_own", agent.channel)
    return agent


def operations(context, count=1):
    for number in range(count):
        context.allreduce(np.ones(3, np.float32), Sum, name=f"grad{number}")


class TestAnswers:
    def test_numbers_and_records_of_a_running_job(self, agent):
        def work(context):
            operations(context)
            context.engine.allreduce([np.ones(2)], Sum, "loss").wait()
            found = []
            if context.rank == 0:
                agent.channel.add(context.group.flight)
                agent.ask(NUMBERS, RECORD)
                found = [agent.next(), agent.next()]
            context.barrier()
            return found

        (numbers, found), _ = run_ranks(2, work, settings=SETTINGS)
        assert (numbers["type"], numbers["rank"], numbers["size"]) == ("numbers", 0, 2)
        assert numbers["kinds"]["allreduce"][0] >= 1
        assert (found["type"], found["reason"], found["error"]) == ("record", "asked", "")
        assert (found["rank"], found["size"], found["pid"]) == (0, 2, os.getpid())
        calls, engine = found["lanes"]
        assert calls["name"] == "calls" and calls["ordered"] and calls["members"] == [0, 1]
        assert [row["name"] for row in calls["operations"]] == ["grad0"]
        assert abs(calls["operations"][0]["at"] - found["at"]) < LIMIT_S
        assert engine["name"] == "engine" and engine["sets"] == {"0": [0, 1]} and engine["paused"] == ""
        assert [row["name"] for row in engine["operations"]] == ["loss"]
        assert engine["operations"][0]["took"] >= 0.0 and found["threads"]

    def test_the_signal_writes_stacks_without_the_lock(self, agent):
        os.kill(os.getpid(), signal.SIGUSR1)
        text = b""
        while b"most recent call first" not in text or b"test_flight_recorder" not in text:
            text += os.read(agent.pipe, 65536)

    def test_a_handler_of_the_program_stays(self, silent):
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        try:
            silent.open()
            assert silent.next() == {"type": "hello", "signal": False}
            os.kill(os.getpid(), signal.SIGUSR1)
            assert eventually(lambda: seen == [signal.SIGUSR1])
        finally:
            signal.signal(signal.SIGUSR1, before)

class TestEnds:
    def test_a_program_that_ends_sends_its_last_operations(self, agent, monkeypatch):
        monkeypatch.setattr(sys, "last_value", KeyError("bad sample"), raising=False)

        def work(context):
            operations(context, 30)
            if context.rank == 0:
                agent.channel.add(context.group.flight)
            return context.group.flight

        recorder, _ = run_ranks(2, work, settings=SETTINGS)
        assert recorder.closed
        agent.channel._report_end()
        found = agent.next()
        assert (found["reason"], found["error"]) == ("ended", "uncaught KeyError: 'bad sample'")
        assert found["left"] == "it called shutdown()" and found["threads"] == []
        names = [row["name"] for row in found["lanes"][0]["operations"]]
        assert names == [f"grad{number}" for number in range(10, 30)]

def fail_in_a_job(**settings):
    """Rank 1 of two fails, and rank 0 loses it."""

    def work(context):
        operations(context)
        if context.rank == 1:
            raise KeyError("bad sample")
        context.barrier()

    changed = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0, **settings)
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, work, "tcp", changed)
    lost, _ = caught.value.errors
    assert isinstance(lost, PeerLostError) and lost.rank == 1


class TestFailures:
    def test_each_rank_reports_its_failure_once_and_the_culprit(self, launched):
        fail_in_a_job()
        found = [launched.next(), launched.next()]
        launched.channel.send({"type": "next"})
        assert launched.next() == {"type": "next"}
        assert [item["reason"] for item in found] == ["failure"] * 2
        assert {item["culprit"] for item in found} == {None, 1}
        lost = next(item for item in found if item["culprit"] == 1)
        assert lost["error"].startswith("PeerLostError: ") and lost["because"] in lost["error"]
        assert any("bad sample" in item["error"] for item in found)
        # Recorders of jobs that have ended are in no record of the next one.
        forget_what_is_closed()
        assert launched.channel.recorders == []

    def test_without_ringrun_each_rank_writes_a_file_for_its_user_alone(self, tmp_path):
        folder = tmp_path / "records"
        fail_in_a_job(diagnose_dir=str(folder))
        files = sorted(folder.iterdir())
        assert [path.name for path in files] == ["flight.0.json", "flight.1.json"]
        for rank, path in enumerate(files):
            found = json.loads(path.read_text())
            assert (found["rank"], found["reason"]) == (rank, "failure")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

class TestSending:
    def test_a_launcher_that_does_not_read_holds_nothing_up(self, agent, monkeypatch):
        monkeypatch.setattr(module, "SEND_S", 0.05)
        agent.channel.send({"text": "x" * (1 << 24)})
        assert agent.channel._sending.acquire(blocking=False)
        agent.channel.send({"text": "another thread sends"})  # it waits for that thread no longer
        agent.channel._sending.release()


class TestDescriptors:
    def given(self, monkeypatch, *items):
        monkeypatch.setenv("RINGCOMM_FLIGHT_FD", ",".join(f"{number}:{inode}" for number, inode in items))
        monkeypatch.setattr(RecorderSocket, "_opened", False)
        monkeypatch.setattr(RecorderSocket, "_own", None)

    def test_the_channel_is_opened_once_and_not_inherited(self, silent, monkeypatch):
        sock, stacks = silent.theirs.detach(), silent.stacks
        os.set_inheritable(stacks, True)
        self.given(monkeypatch, (sock, os.fstat(sock).st_ino), (stacks, os.fstat(stacks).st_ino))
        silent.channel = made = RecorderSocket.of_this_process()
        silent.theirs = made._socket
        assert RecorderSocket.of_this_process() is RecorderSocket.made_before() is made
        assert not os.get_inheritable(sock) and not os.get_inheritable(stacks)
        assert silent.next()["type"] == "hello"
        made._pid = -1  # in a fork
        assert RecorderSocket.of_this_process() is None
        forget_what_is_closed()

    @pytest.mark.parametrize("wrong", ["inode", "closed"])
    def test_descriptors_of_something_else_are_left_alone(self, wrong, silent, monkeypatch):
        sock, stacks = silent.theirs.fileno(), silent.stacks
        inode = os.fstat(stacks).st_ino
        other = (stacks, inode + 1) if wrong == "inode" else (1 << 20, inode)
        self.given(monkeypatch, (sock, os.fstat(sock).st_ino), other)
        assert RecorderSocket.of_this_process() is None and RecorderSocket.of_this_process() is None
        silent.theirs.sendall(b"still open\n")
        assert silent.lines.readline() == b"still open\n"
