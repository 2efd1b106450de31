"""What the supervisor decides: what agents may say, hosts that do not start, the end, restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.diagnosis.failure_report import host_problem
from ringrun.diagnosis.first_failure import Cause, Exit
from ringrun.job import supervise
from ringrun.job.agents import Loop, failed_start
from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.job.supervise import (
    END,
    GRACE_S,
    INTERRUPT,
    KILL,
    LEAVING_S,
    SAME_S,
    Attempts,
    Ending,
    Supervisor,
    attempt_of,
    is_worthwhile,
    term,
)
from ringrun.plan.job import HostJob, Job
from ringrun.plan.options import Options
from ringrun.reach.base import last_lines
from ringrun.reach.incoming import Incoming, event_facts
from ringrun.reach.protocol import Frame
from ringrun.show.output import Console
from tests.unit.ringrun.show.samples import report

LIMITS = {"threads": 1, "cores": 2.0, "ranks": 1, "kept": {}, "unbound": ""}
READY = {"event": "ready", "limits": LIMITS, "port": 22}
FOUND = {"python": "/p", "version": "3.9.1"}
EXIT = {"event": "exit", "code": 0, "signal": None, "sent": 0}


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(prepare(Options(hosts="here,there"), ["true"]), Console(), lambda notify: None)  # type: ignore[arg-type,return-value]
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
        event(-1, event="exit", code=0, signal=None, sent=0),
        event(0, event="exit", code="0", signal=None, sent=0),
        event(0, event="exit", code=0, signal=[], sent=0),
        event(0, **{**EXIT, "code": 1 << 40}),
        event(0, event="started", pid=-1),
        event(-1, **{**READY, "port": "22"}),
        event(-1, event="ready", limits=LIMITS),
        event(-1, **{**READY, "limits": {**LIMITS, "threads": "x"}}),
        event(-1, **{**READY, "limits": {**LIMITS, "kept": {"A": 1}}}),
        event(-1, **{**READY, "found": {"version": "3.9.1"}}),
        event(-1, **{**READY, "found": {**FOUND, "python": ["x"]}}),
        event(-1, **{**READY, "login": "a\nb c d"}),
        event(-1, event="lacks", files=["../x"]),
        event(-1, event="problem", problem="missing", path="p", found={"missing": "x; rm -r", "why": ""}),
        event(-1, event="needs", found={"lacks": ["evil"]}, machine="aarch64", glibc="2.31"),
        Frame(framing.RESULT, 0, b"this job has no function"),
        Frame(framing.FILE, 0, b'{"path": "a", "offset": 0}\nx'),
        Frame(framing.EVENT, -1, b'{"event": "done", "x": %s}' % (b"9" * 100_000)),
        event(-1, event="problem", problem="cwd"),
        event(-1, event="problem", problem="old", path="python", found={}),
        event(-1, event="needs", found={}, machine="x/../..", glibc="2.31"),
        event(-1, event="needs", found={}, machine="aarch64", glibc="2.31\n"),
        event(-1, event="needs", found={"version": "3.9/../.."}, machine="aarch64", glibc="2.31"),
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
    shown = host_problem("a", facts, False)
    assert shown == f"a: {facts['path']} could not be started: {facts['why']}."
    assert last_lines(words) == "'gone.; ringrun: run `curl x`'"


@pytest.mark.parametrize("kind", ["cwd", "script", "interpreter"])
def test_remedies_for_a_machine_that_has_joined(kind: str) -> None:
    shown = host_problem("desk", {"problem": kind, "path": "/x"}, False, is_named=False)
    assert "ringrun join" in shown and "--cwd desk" not in shown and "--python" not in shown


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


NO_PYTHON = "sh: /p/python: not found"


@pytest.fixture
def host() -> HostJob:
    return prepare(Options(hosts="far", python=("/p/python",)), ["train.py"], {}).hosts[0]


def link(host: HostJob, **facts: Any) -> Any:
    return SimpleNamespace(**{"argv": host.argv, "stderr_text": "", "noise": "", "attempt": 1, **facts})


def test_without_the_interpreter_another_is_tried_once(host: HostJob) -> None:
    host = replace(host, fallback=["ssh", "far", "python3 -c ..."])
    notes: List[str] = []
    tried = link(host, stderr_text=NO_PYTHON)
    assert failed_start(host, tried, 127, notes.append) is None
    assert notes == ["far has no /p/python: using python3 there"] and tried.argv == host.fallback
    text = failed_start(host, tried, 127, notes.append)
    assert text is not None and "no Python at /p/python or python3" in text and len(notes) == 1


def test_a_host_that_is_still_starting_is_tried_until_the_start_timeout(host: HostJob) -> None:
    may_appear = replace(host, reach=type(host.reach)(host.reach._options, may_appear=True))  # type: ignore[attr-defined]
    refused = link(may_appear, stderr_text="connect to host far port 22: Connection refused", attempt=99)
    assert failed_start(may_appear, refused, 255, lambda text: None) is None
    assert failed_start(host, refused, 255, lambda text: None) is not None


class Ended:
    """The end of a job; the steps by which its ranks are ended are kept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.exits: Dict[int, Exit] = {}
        self.steps: List[Any] = []
        self.loop = Loop(lambda: self.now_s)
        self.ending = Ending(self.loop, self.exits, self.steps.append)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.loop.run_once(0.0)

    def exit(self, rank: int, signum: int = 0) -> None:
        self.exits[rank] = Exit(rank, None if signum else 1, signum or None, signum)
        self.ending.exited()

    def signal(self, signum: int, has_failed: bool = False) -> str:
        return self.ending.signalled(signum, 30.0, [0, 1], has_failed)


@pytest.fixture
def job() -> Iterator[Ended]:
    made = Ended()
    yield made
    made.loop.close()


def test_the_others_have_some_time_after_the_first_failure(job: Ended) -> None:
    assert job.ending.after_failure() and not job.ending.after_failure(), "it begins once"
    job.exit(1)
    job.pass_time(GRACE_S / 2)
    assert job.steps == [] and job.ending.reason == ""
    job.pass_time(GRACE_S / 2)
    assert job.steps == [END] and job.ending.reason == "failure"


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_leaving_has_longer_but_not_for_ever(job: Ended, ends: bool) -> None:
    job.ending.after_failure()
    job.ending.leaving.add(2)
    job.exit(1)
    job.pass_time(GRACE_S)
    assert job.steps == []
    if ends:
        job.exit(2)
    else:
        job.pass_time(LEAVING_S)
    assert job.steps == [END] and not job.loop.is_set("grace")


@pytest.mark.parametrize(
    ("signals", "steps"),
    [
        (((2, 0.0),), [INTERRUPT]),
        (((2, 0.0), (2, 0.1)), [INTERRUPT, KILL]),
        (((15, 0.0), (15, SAME_S / 2)), [term(30.0)]),
        (((15, 0.0), (1, SAME_S / 2), (15, SAME_S)), [term(30.0), KILL]),
    ],
)
def test_the_second_signal_ends_ranks_at_once_unless_it_is_the_same_request(
    job: Ended, signals: Tuple[Tuple[int, float], ...], steps: List[Any]
) -> None:
    lines = []
    for signum, after_s in signals:
        job.now_s += after_s
        lines.append(job.signal(signum))
    assert job.steps == steps and job.ending.reason == "interrupt" and job.ending.signum == signals[0][0]
    assert "ending all ranks on all hosts (once more: at once)" in lines[0] and not any(lines[1:])


@pytest.mark.parametrize(
    ("first", "again_s", "text"),
    [
        (15, 0.0, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (15, 40.0, "killed 30 s after SIGTERM, while handling it; --grace S gives them longer"),
        (15, 4.04, "killed by the second signal, 4.0 s after SIGTERM, while handling it"),
        (2, 0.0, "killed 3.5 s after SIGINT, while handling it"),
    ],
)
def test_ranks_that_did_not_end_in_time_are_named_once(
    job: Ended, first: int, again_s: float, text: str
) -> None:
    job.signal(first)
    if again_s:
        job.now_s += again_s
        job.signal(15)
    job.exit(0, 15)
    job.exit(1, 9)
    assert (job.ending.killed(), job.ending.killed()) == ({text: [1]}, {})


def failure(code: Optional[int] = 1, reason: str = "failure") -> Outcome:
    cause = Cause(0, None, "exit code", "", code or 137, Exit(0, code, None if code else 9))
    return Outcome(code or 137, f"box {code}\n", reason, cause)


DONE = Outcome(0, "", "done")
LOST = Outcome(255, "box\n", "failure", Cause(None, 1, "gone", "", 255))


class Screen:
    """Takes what is shown."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, stream: int, data: bytes) -> None:
        assert stream == 2
        self.text += data.decode()


@pytest.mark.parametrize(
    ("outcome", "attempt", "again"),
    [
        (failure(), 0, True),
        (failure(None), 3, True),
        (LOST, 0, True),
        (failure(2), 0, False),
        (DONE, 0, False),
        (Outcome(130, "", "interrupt"), 0, False),
        (Outcome(141, "", "pipe"), 0, False),
        (Outcome(1, "box", "start"), 0, False),
        (Outcome(1, "box", "start"), 1, True),
    ],
)
def test_whether_it_is_worthwhile(outcome: Outcome, attempt: int, again: bool) -> None:
    assert is_worthwhile(outcome, attempt) is again


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Attempts]:
    """`attempts(screen, restarts, run)`: attempts that end with the outcomes that `run(job)` returns."""

    def make(screen: Any, restarts: int, run: Callable[[Job], Outcome]) -> Attempts:
        supervisor = lambda job, *_: SimpleNamespace(run=lambda: run(job), interrupt=print)  # noqa: E731
        monkeypatch.setattr(supervise, "Supervisor", supervisor)
        return Attempts(prepare(Options(np=1), ["true"]), restarts, screen)

    return make


def test_until_it_ends_well(attempts: Callable[..., Attempts], monkeypatch: pytest.MonkeyPatch) -> None:
    screen, left, numbers, waits = Screen(), [failure(3), LOST, DONE], [], []

    def run(job: Job) -> Outcome:
        numbers.append(job.attempt)
        return left.pop(0)

    made = attempts(screen, 5, run)
    monkeypatch.setattr(made._interrupted, "wait", waits.append)
    assert made.run() is DONE
    assert numbers == [0, 1, 2] and waits == [1.0, 2.0]
    assert screen.text == (
        "box 3\nringrun: attempt 1 of 6 has failed; the next one starts in 1 s (--restarts 5).\n"
        "box\nringrun: attempt 2 of 6 has failed; the next one starts in 2 s (--restarts 5).\n"
    )


def test_interrupted_while_it_waits(attempts: Callable[..., Attempts]) -> None:
    screen: Any = Screen()
    made = attempts(screen, 3, lambda job: failure(3))
    screen.write = lambda *_: made.interrupt(2)
    outcome = made.run()
    assert (outcome.reason, outcome.exit_code, outcome.report) == ("interrupt", 130, "")


def test_a_job_that_its_user_ends_is_not_restarted(attempts: Callable[..., Attempts]) -> None:
    screen: Any = Screen()

    def run(job: Job) -> Outcome:
        made.interrupt(2)  # one rank fails because of it, before it is counted as interrupted
        return failure(3)

    made = attempts(screen, 3, run)
    assert made.run().exit_code == 3 and screen.text == ""


def test_an_attempt_is_a_job_of_its_own() -> None:
    job = prepare(Options(np=2, output_dir="logs"), ["true"])
    first, second = attempt_of(job, 0, 1), attempt_of(job, 1, 1)
    assert len({first.id, second.id, job.id}) == 3
    assert len({first.key, second.key, job.key}) == 3
    assert second.output_dir == Path("logs/attempt.1")
    assert attempt_of(job, 0, 0).output_dir == Path("logs")
    for number, item in enumerate((first, second)):
        assert item.agent_config(item.hosts[0])["env"]["RINGCOMM_RESTART"] == str(number)
