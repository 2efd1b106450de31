"""What an agent may say: of its own ranks, and nothing that makes no sense."""

from __future__ import annotations

import json
from typing import Any, Iterator, List, Tuple

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.job.launch import prepare
from ringrun.job.supervise import Supervisor
from ringrun.plan.options import Options
from ringrun.reach.protocol import Frame
from ringrun.show.console import Console
from tests.unit.ringrun.watch.samples import report

LIMITS = {"threads": 1, "cores": 2.0, "ranks": 1, "kept": {}}


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(prepare(Options(hosts="here,there"), ["true"]), Console())
    yield made
    made._loop.close()


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
        event(-1, event="ready", limits=LIMITS, port="22"),
        event(-1, event="ready", limits={**LIMITS, "threads": "x"}),
        event(-1, event="ready", limits=7),
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
    assert not supervisor._failure.exits and not supervisor._ready and not supervisor._results


# ---- what follows from a frame --------------------------------------------------------------------------


def record(reason: str, **more: Any) -> bytes:
    content = {"type": "record", "format": 1, "reason": reason, "lanes": [], "generation": 0, "threads": []}
    return json.dumps({**content, **more}).encode()


def test_numbers_of_a_rank_are_kept(supervisor: Supervisor) -> None:
    supervisor.received(supervisor.job.hosts[0], Frame(framing.NUMBERS, 0, report(0, 1.0, steps=3)))
    assert supervisor._watching.history.present() == {0: 0}


def test_a_rank_that_says_goodbye_may_be_the_cause(supervisor: Supervisor) -> None:
    """Unless it has failed because of another one."""
    here, there = supervisor.job.hosts
    failed = record("failure", culprit=0, because="rank 0 was lost", error="PeerLostError: rank 0 was lost")
    for data in (failed, record("ended", generation=1)):
        supervisor.received(there, Frame(framing.RECORD, 1, data))
    assert supervisor._grace.leaving == set()
    supervisor.received(here, Frame(framing.RECORD, 0, record("asked")))
    assert supervisor._grace.leaving == set()
    supervisor.received(here, Frame(framing.RECORD, 0, record("ended", generation=1)))
    assert supervisor._grace.leaving == {0}


def test_what_hosts_ask_for(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    done: List[Tuple[str, str]] = []
    supply, inquiry = supervisor._supply, supervisor._inquiry
    monkeypatch.setattr(supply, "send", lambda host, facts: done.append(("send", host.name)))
    monkeypatch.setattr(supply, "provision", lambda host, facts: done.append((facts["machine"], host.name)))
    monkeypatch.setattr(inquiry, "for_the_user", lambda: done.append(("inquiry", "")))
    here, there = supervisor.job.hosts
    supervisor.received(here, event(-1, event="lacks", files=["0" * 32]))
    supervisor.received(there, event(-1, event="needs", found={}, machine="aarch64", glibc="2.31"))
    supervisor.received(here, event(-1, event="asked"))
    supervisor.received(here, event(0, event="started", pid=7))
    assert done == [("send", "here"), ("aarch64", "there"), ("inquiry", "")]
