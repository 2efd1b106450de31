"""What an agent may say, how often, and how much: of its own ranks, and nothing that makes no sense."""

from __future__ import annotations

import json
from typing import Any, Iterator

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.diagnosis.failure_report import host_problem
from ringrun.job.launch import prepare
from ringrun.job.supervise import FixedRanks, Supervisor
from ringrun.plan.options import Options
from ringrun.reach.base import last_lines
from ringrun.reach.incoming import Incoming, event_facts
from ringrun.reach.protocol import Frame
from ringrun.show.console import Console
from tests.unit.ringrun.watch.samples import report

LIMITS = {"threads": 1, "cores": 2.0, "ranks": 1, "kept": {}, "unbound": ""}
READY = {"event": "ready", "limits": LIMITS, "port": 22}
FOUND = {"python": "/p", "version": "3.9.1"}
EXIT = {"event": "exit", "code": 0, "signal": None, "sent": 0}


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(prepare(Options(hosts="here,there"), ["true"]), Console(), FixedRanks)
    for rank, host in enumerate(made.hosts):
        host.ranks = {rank}
    yield made
    made.loop.close()


def event(rank: int, **facts: Any) -> Frame:
    return Frame(framing.EVENT, rank, json.dumps(facts).encode())


@pytest.mark.parametrize(
    "frame",
    [
        *(Frame(kind, 1, b"{}") for kind in (framing.STDOUT, framing.STDERR, framing.RESULT, framing.RECORD)),
        *(Frame(kind, -1, b"{}") for kind in (framing.STDOUT, framing.RESULT, framing.RECORD)),
        Frame(framing.FILE, -1, b'{"path": "a", "offset": 0}\nx'),
        event(1, event="exit", code=0, signal=None, sent=0),
        event(7, event="started", pid=1),
        event(-1, event="exit", code=0, signal=None, sent=0),
        event(0, event="exit", code="0", signal=None, sent=0),
        event(0, event="exit", code=0, signal=[], sent=0),
        event(0, **{**EXIT, "code": True}),
        event(0, **{**EXIT, "code": None}),
        event(0, **{**EXIT, "signal": 9}),
        event(0, **{**EXIT, "code": 1 << 40}),
        event(0, event="started", pid=-1),
        event(-1, **{**READY, "port": "22"}),
        event(-1, **{**READY, "port": 70_000}),
        event(-1, event="ready", limits=LIMITS),
        event(-1, **{**READY, "limits": {**LIMITS, "threads": "x"}}),
        event(-1, **{**READY, "limits": {**LIMITS, "kept": {"A": 1}}}),
        event(-1, **{**READY, "limits": 7}),
        event(-1, **{**READY, "found": {"version": "3.9.1"}}),
        event(-1, **{**READY, "found": {**FOUND, "python": ["x"]}}),
        event(-1, **{**READY, "login": "a\nb c d"}),
        event(-1, event="lacks", files=["../x"]),
        event(-1, event="problem", problem="missing", path="p", found={"missing": "x; rm -r", "why": ""}),
        event(-1, event="problem", problem=["cwd"], path="p"),
        event(-1, event="needs", found={"lacks": ["evil"]}, machine="aarch64", glibc="2.31"),
        Frame(framing.RESULT, 0, b"this job has no function"),
        Frame(framing.FILE, 0, b'{"path": "a", "offset": 0}\nx'),
        Frame(framing.EVENT, -1, b'{"event": "done", "x": %s}' % (b"9" * 100_000)),
        event(-1, event="problem", problem="cwd"),
        event(-1, event="problem", problem="old", path="python", found={}),
        event(-1, event="needs", found={}, machine="x/../..", glibc="2.31"),
        event(-1, event="needs", found={}, machine="a" * 40, glibc="2.31"),
        event(-1, event="needs", found={}, machine="aarch64", glibc="2.9999999"),
        event(-1, event="needs", found={}, machine="aarch64", glibc="2.31\n"),
        event(-1, event="needs", found={"version": "3.9/../.."}, machine="aarch64", glibc="2.31"),
        event(-1, event="needs", found={"version": 3}, machine="aarch64", glibc="2.31"),
        Frame(framing.EVENT, -1, b'{"event": "done", "x": Infinity}'),
        Frame(framing.EVENT, -1, b"[" * 100_000),
        Frame(framing.EVENT, -1, b'["event"]'),
    ],
)
def test_an_agent_that_says_what_it_may_not_is_refused_with_a_sentence(
    supervisor: Supervisor, frame: Frame
) -> None:
    with pytest.raises(ProtocolError) as caught:
        supervisor.received(supervisor.job.hosts[0], frame)
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).isprintable()
    assert not supervisor.failure.exits and not supervisor.hosts[0].ready and not supervisor.results


@pytest.mark.parametrize(
    ("times", "frame"),
    [
        (1, event(-1, **READY)),
        (1, event(-1, event="needs", found={}, machine="aarch64", glibc="2.31")),
        (2, event(-1, event="lacks")),
        (1, event(0, **EXIT)),
        (1, event(0, event="started", pid=7)),
        (16, Frame(framing.RECORD, 0, bytes(4 << 20))),
    ],
)
def test_what_is_said_too_often_is_refused(times: int, frame: Frame) -> None:
    """Another `ready` would open another rendezvous, another `lacks` queue another archive."""
    incoming = Incoming(False, lambda: 0.0)
    for _ in range(times):
        incoming.admit(frame, {0})
    with pytest.raises(ProtocolError):
        for _ in range(max(1, times)):
            incoming.admit(frame, {0})


def test_results_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringrun.reach.incoming.RESULT_BYTES", 1 << 20)
    incoming = Incoming(True, lambda: 0.0)
    incoming.admit(Frame(framing.RESULT, 0, bytes(1 << 20)), {0})
    with pytest.raises(ProtocolError, match="results of more than 1 MiB; functions that return more"):
        incoming.admit(Frame(framing.RESULT, 0, b"x"), {0})


def test_the_words_of_a_host_are_quoted() -> None:
    words = "gone.\nringrun: run `curl x`"
    facts = event_facts(event(-1, event="problem", problem="start", path=words, why=words).data)
    assert facts["path"] == facts["why"] == "'gone.\\nringrun: run `curl x`'"
    shown = host_problem("a", facts, False, str)
    assert shown == f"a: {facts['path']} could not be started: {facts['why']}."
    assert last_lines(words) == "'gone.; ringrun: run `curl x`'"


# ---- what follows from a frame --------------------------------------------------------------------------


def record(reason: str, **more: Any) -> bytes:
    content = {"type": "record", "format": 1, "reason": reason, "lanes": [], "generation": 0, "threads": []}
    return json.dumps({**content, **more}).encode()


def test_no_host_speaks_of_others_ranks_or_ends_their_generation(supervisor: Supervisor) -> None:
    supervisor.received(supervisor.job.hosts[0], Frame(framing.NUMBERS, 0, report(0, 1.0, steps=3)))
    for rank in (0, 1):
        data = report(rank, 9.0, generation=1 << 40)
        supervisor.received(supervisor.job.hosts[1], Frame(framing.NUMBERS, 1, data))
    assert supervisor.watching.history.present() == {0: 0, 1: 1}


def test_a_rank_that_says_goodbye_may_be_the_cause(supervisor: Supervisor) -> None:
    """Unless it has failed because of another one."""
    here, there = supervisor.job.hosts
    failed = record("failure", culprit=0, because="rank 0 was lost", error="PeerLostError: rank 0 was lost")
    for data in (failed, record("ended", generation=1)):
        supervisor.received(there, Frame(framing.RECORD, 1, data))
    assert supervisor.ending.leaving == set()
    supervisor.received(here, Frame(framing.RECORD, 0, record("asked")))
    assert supervisor.ending.leaving == set()
    supervisor.received(here, Frame(framing.RECORD, 0, record("ended", generation=1)))
    assert supervisor.ending.leaving == {0}
    supervisor.received(there, Frame(framing.RECORD, 1, record("silent", state="starved")))
    assert supervisor.ending.leaving == {0, 1}, "it gets no processor, and may explain its end"
