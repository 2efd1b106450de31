"""What an agent may say: of its own ranks, and nothing that makes no sense."""

from __future__ import annotations

import json
from typing import Any, Iterator

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.job.launch import Options, prepare
from ringrun.job.supervise import Supervisor
from ringrun.reach import doors
from ringrun.reach.protocol import Frame
from ringrun.show.console import Console

LIMITS = {"threads": 1, "cores": 2.0, "ranks": 1, "kept": {}}


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(doors, "find_local", lambda specs, **_: [False] * len(specs))  # asks no resolver
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
