"""What is asked of ranks while they run: flight records, counters for the live view, and the view's keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Collection, Dict, Iterator, List

import pytest

from ringrun.diagnosis.first_failure import Complaint, FirstFailure
from ringrun.job import observing as module
from ringrun.job.agents import Loop
from ringrun.job.launch import prepare
from ringrun.job.observing import ANSWER_S, LINE_S, Inquiry, Watching
from ringrun.plan.environment import from_values
from ringrun.plan.job import Observation
from ringrun.plan.options import Options
from ringrun.show.console import Console
from ringrun.show.output import Printer
from tests.unit.ringrun.watch.samples import report

LOST = "rank 1 was lost"


def record(reason: str = "asked", **more: Any) -> bytes:
    row = {
        "op": 1, "kind": "allreduce", "name": "", "what": "allreduce", "site": "a.py:1", "state": "running",
        "at": 1.0,
    }  # fmt: skip
    channels = [{"name": "calls", "ordered": True, "members": [0, 1], "operations": [row]}]
    content: Dict[str, Any] = {"type": "record", "format": 1, "reason": reason, "lanes": channels}
    return json.dumps({**content, "generation": 0, "threads": [], **more}).encode()


class Started:
    """An inquiry for a job of two ranks on one host; commands to the agent and texts are kept."""

    def __init__(self, folder: Path) -> None:
        self.asked: List[Dict[str, str]] = []
        self.shown: List[str] = []
        self.failure = FirstFailure()
        self.exits = self.failure.exits
        self.now_s = 100.0
        self.folder = folder
        self.link = SimpleNamespace(answered=True, alive=True, send=self.asked.append)
        values = {"diagnose_dir": str(folder)}
        job = prepare(Options(np=2, setting_values=from_values(values)), ["true"])
        self.loop = Loop(lambda: self.now_s)
        links: Any = [self.link]
        self.inquiry = Inquiry(job, links, self.loop, self.shown.append, self.failure)

    def be_late(self) -> None:
        """The time for answers is over."""
        self.now_s += ANSWER_S
        self.loop.run_once(0.0)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path / "records")
    yield made
    made.loop.close()


def test_the_ranks_of_the_last_view_of_an_elastic_job_are_explained(started: Started) -> None:
    started.inquiry.members = [1]
    started.inquiry.take(0, record("failure", error="PeerLostError: x"))
    started.inquiry.take(1, record("failure", error="uncaught ValueError: x"))
    told = started.inquiry.conclude(False)
    assert told.startswith("In the last view rank 0 is process 1.\nRank 0 (localhost) "), told
    (path,) = started.folder.iterdir()
    kept = json.loads(path.read_text())
    assert (path.name, kept["rank"], kept["size"]) == ("flight.0.json", 0, 1)


def test_the_answers_are_shown_and_written_when_all_have_come(started: Started) -> None:
    started.inquiry.for_the_user()
    started.inquiry.for_the_user()
    assert started.asked == [{"do": "diagnose"}], "the ranks are being asked already"
    assert started.inquiry.take(0, record()) == "asked" and started.shown == []
    assert started.inquiry.take(1, record()) == "asked"
    (text,) = started.shown
    assert f"Their last operations and stacks: ringrun diagnose {started.folder}" in text
    assert sorted(path.name for path in started.folder.iterdir()) == ["flight.0.json", "flight.1.json"]
    assert not started.loop.is_set("inquiry")
    started.inquiry.for_the_user()
    assert len(started.asked) == 2, "the user may ask again"


def test_after_a_failure_the_ranks_are_asked_once(started: Started) -> None:
    started.inquiry.take(1, record("failure", culprit=None, error="uncaught ValueError: x"))
    started.inquiry.take(0, record("asked", pid=1))
    for _ in range(2):
        started.inquiry.after_failure()
    started.inquiry.for_the_user()
    assert started.asked == [{"do": "diagnose"}] and started.shown == []
    started.inquiry.take(0, record("failure", culprit=1, because=LOST, error=f"PeerLostError: {LOST}"))
    assert started.inquiry.records.is_victim(0) and not started.inquiry.records.is_victim(1)
    assert started.inquiry.records.explanations({0: [f"PeerLostError: {LOST}"]}) == [Complaint(0, 1, LOST)]
    last = started.inquiry.conclude(False)
    assert f"ringrun diagnose {started.folder}" in last and (started.folder / "flight.1.json").exists()


def test_records_that_cannot_be_written_where_they_should_be(started: Started, tmp_path: Path) -> None:
    started.folder.touch()
    started.inquiry.for_the_user()
    started.inquiry.take(0, record())
    started.inquiry.take(1, record())
    assert "The flight records could not be written: " in started.shown[0]
    assert started.shown[0].endswith("Name a folder with --diagnose-dir.")


# ---- counters -----------------------------------------------------------------------------------------

SLOWEST = "is the slowest"


class Kept(Console):
    """A console that keeps its text, and may be a terminal."""

    def __init__(self, terminals: Collection[int]) -> None:
        self.text = b""
        self._terminals = terminals

    @property
    def terminals(self) -> Collection[int]:
        return self._terminals

    def write(self, stream: int, data: bytes) -> None:
        self.text += data


class Typed:
    """In place of the terminal's keys: a test types."""

    def __init__(self, loop: object, take: Callable[[bytes], None]) -> None:
        self.type = take
        self.active = False

    def start(self) -> None:
        self.active = True

    def stop(self) -> None:
        self.active = False


class Viewed:
    """The view of a job of three ranks; commands to the agents and requests for stacks are kept."""

    def __init__(self, observation: Observation, terminals: Collection[int] = ()) -> None:
        self.asked: List[Dict[str, str]] = []
        self.diagnosed = 0
        self.now_s = 100.0
        job = replace(prepare(Options(np=3), ["train.py"], {"PATH": "/"}), observation=observation)
        self.console = Kept(terminals)
        self.loop = Loop(lambda: self.now_s)
        self.printer = Printer(job, self.console, {1: False, 2: False}, self.loop.clock)
        links: Any = [
            SimpleNamespace(answered=True, alive=True, send=self.asked.append),
            SimpleNamespace(answered=False, alive=True, send=self.asked.append),
            SimpleNamespace(answered=True, alive=False, send=self.asked.append),
        ]
        self.watching = Watching(job, links, self.loop, self.printer, True, self._diagnose)

    def _diagnose(self) -> None:
        self.diagnosed += 1

    @property
    def keys(self) -> Any:
        return self.watching._keys

    @property
    def text(self) -> str:
        return self.console.text.decode()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.loop.run_once(0.0)

    def report(self, second: int) -> None:
        """Rank 2 computes, and the others wait for it."""
        for rank in range(3):
            peers = {"2": [0, 0, 0.7 * second, 0, 0.0]} if rank != 2 else {}
            waited_s = 0.8 * second if rank != 2 else 0.0
            data = report(rank, float(second), steps=2 * second, waited_s=waited_s, peers=peers)
            self.watching.take(rank, data)

    def run(self, seconds: int) -> None:
        for second in range(seconds):
            self.report(second)
            self.pass_time(1.0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Viewed]]:
    """`start(observation, terminals)`: a view that has been started."""
    monkeypatch.setattr(module, "Keys", Typed)
    made: List[Viewed] = []

    def begin(observation: Observation, terminals: Collection[int] = ()) -> Viewed:
        made.append(Viewed(observation, terminals))
        made[-1].watching.start()
        return made[-1]

    yield begin
    for item in made:
        item.watching.stop()
        item.loop.close()


def test_without_options_no_rank_is_asked(start: Callable[..., Viewed]) -> None:
    job = start(Observation())
    job.pass_time(100.0)
    job.watching.write_report("done", "", ())
    assert job.asked == [] and not job.loop.is_set("numbers") and job.text == ""


def test_without_a_terminal_there_is_a_line_now_and_then(start: Callable[..., Viewed]) -> None:
    job = start(Observation(watch=True))
    job.run(5)
    assert job.text == "" and not job.keys.active
    job.run(int(LINE_S))
    assert job.text.count("\n") == 1 and SLOWEST in job.text
    job.watching.stop()
    assert job.text.count("\n") == 2, "the last one stays"
    job.watching.stop()
    assert job.text.count("\n") == 2


def test_on_a_terminal_there_is_a_table(start: Callable[..., Viewed]) -> None:
    job = start(Observation(watch=True), terminals=(1, 2))
    assert job.keys.active
    job.run(10)
    lines = [line.decode() for line in job.printer.block]
    assert "rank" in lines[0] and "q: leave this view" in lines[-1]
    (slow,) = [line for line in lines if line.startswith("\x1b[31m>")]
    assert "    2  localhost" in slow
    assert job.text == ""
    job.watching.stop()
    assert list(job.printer.block) == [] and not job.keys.active
    assert "ringrun: >    2  localhost" in job.text and "\x1b" not in job.text, "the last table stays"


def test_the_keys_of_the_view(start: Callable[..., Viewed]) -> None:
    job = start(Observation(watch=True), terminals=(2,))
    job.run(3)
    job.keys.type(b"xs")
    assert job.diagnosed == 1 and job.printer.block
    job.keys.type(b"q")
    assert list(job.printer.block) == [] and not job.keys.active
    job.run(3)
    job.watching.stop()
    assert list(job.printer.block) == [] and job.text == "", "the view has been left"
    assert len(job.asked) >= 5, "the report may still need them"


# ---- keys of a real terminal --------------------------------------------------------------------------
