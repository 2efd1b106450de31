"""The numbers of ranks while a job runs: questions, the live view, the endpoint, the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional

import pytest

from ringrun.job import observing as module
from ringrun.job.event_loop import Loop
from ringrun.job.launch import prepare
from ringrun.job.observing import ASK_S, LINE_S, Watching
from ringrun.plan.job import Observation
from ringrun.plan.options import Options
from ringrun.show.console import Console
from ringrun.show.output import Printer
from tests.unit.ringrun.watch.samples import report

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


class Keys:
    """In place of the terminal's keys: a test types."""

    def __init__(self, loop: object, take: Callable[[bytes], None]) -> None:
        self.type = take
        self.active = False

    def start(self) -> None:
        self.active = True

    def stop(self) -> None:
        self.active = False


class Started:
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
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Started]]:
    """`start(observation, terminals)`: a view that has been started."""
    monkeypatch.setattr(module, "Keys", Keys)
    made: List[Started] = []

    def begin(observation: Observation, terminals: Collection[int] = ()) -> Started:
        made.append(Started(observation, terminals))
        made[-1].watching.start()
        return made[-1]

    yield begin
    for item in made:
        item.watching.stop()
        item.loop.close()


def test_without_options_no_rank_is_asked(start: Callable[..., Started]) -> None:
    job = start(Observation())
    job.pass_time(100.0)
    job.watching.write_report("done", "", ())
    assert job.asked == [] and not job.loop.is_set("numbers") and job.text == ""


def test_ranks_are_asked_once_a_second(start: Callable[..., Started]) -> None:
    job = start(Observation(watch=True))
    job.pass_time(ASK_S / 2)
    assert job.asked == []
    for _ in range(3):
        job.pass_time(ASK_S)
    assert job.asked == [{"do": "numbers"}] * 3, "of the host whose agent can answer"


def test_without_a_terminal_there_is_a_line_now_and_then(start: Callable[..., Started]) -> None:
    job = start(Observation(watch=True))
    job.run(5)
    assert job.text == "" and not job.keys.active
    job.run(int(LINE_S))
    assert job.text.count("\n") == 1 and SLOWEST in job.text
    job.watching.stop()
    assert job.text.count("\n") == 2, "the last one stays"
    job.watching.stop()
    assert job.text.count("\n") == 2


def test_on_a_terminal_there_is_a_table(start: Callable[..., Started]) -> None:
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


def test_the_keys_of_the_view(start: Callable[..., Started]) -> None:
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


@pytest.mark.parametrize("failure", ["", "rank 1 failed: ValueError"])
def test_the_report_is_written_at_the_end(
    start: Callable[..., Started], tmp_path: Path, failure: Optional[str]
) -> None:
    job = start(Observation(report=tmp_path / "run.html"))
    job.watching.history.linked([{"rank": 0, "peer": 1, "iface": "eth0", "peer_iface": "wlan0"}])
    assert job.watching.history.interfaces == {(0, 1): "eth0", (1, 0): "wlan0"}
    job.run(10)
    job.watching.stop()
    job.watching.write_report("done", failure or "", [(3.0, "rank 1 (far) lost")])
    page = (tmp_path / "run.html").read_text()
    assert job.text == f"ringrun: report: {tmp_path / 'run.html'}\n"
    assert "train.py" in page and "rank 1 (far) lost" in page and ("ValueError" in page) is bool(failure)
