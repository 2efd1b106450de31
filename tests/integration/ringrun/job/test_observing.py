"""What is asked of ranks while they run: flight records, counters for the live view, and the view's keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List

import pytest

from ringrun.diagnosis.first_failure import Complaint, FirstFailure
from ringrun.job.agents import Loop
from ringrun.job.launch import prepare
from ringrun.job.outcome import ANSWER_S, LINE_S, Inquiry, Watching
from ringrun.plan.environment import from_values
from ringrun.plan.options import Options
from ringrun.show.output import Printer
from tests.integration.ringrun.job.supervised import Kept
from tests.unit.ringrun.show.samples import report

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


@pytest.mark.parametrize("watch", [True, False])
def test_without_a_terminal_there_is_a_line_now_and_then(watch: bool) -> None:
    """Without an option no rank is asked. On a terminal: ``tests/proc/test_watching.py``."""
    now_s, asked, console = [100.0], [], Kept()
    job = replace(prepare(Options(np=3), ["train.py"], {"PATH": "/"}), watch=watch)
    loop = Loop(lambda: now_s[0])
    links: Any = [
        SimpleNamespace(answered=answered, alive=alive, send=asked.append)
        for answered, alive in ((True, True), (False, True), (True, False))
    ]
    printer = Printer(job, console, {1: False, 2: False}, loop.clock)
    watching = Watching(job, links, loop, printer, True, lambda: None)
    watching.start()
    for second in range(int(LINE_S) + 5):  # rank 2 computes, and the others wait for it
        for rank in range(3):
            peers = {"2": [0, 0, 0.7 * second, 0, 0.0]} if rank != 2 else {}
            waited_s = 0.8 * second if rank != 2 else 0.0
            data = report(rank, float(second), steps=2 * second, waited_s=waited_s, peers=peers)
            watching.history.take(rank, data, now_s[0])
        now_s[0] += 1.0
        loop.run_once(0.0)
        assert second > 5 or not console.text
    for _ in range(2):
        watching.stop()
    watching.write_report("done", "", ())
    loop.close()
    assert bool(asked) is watch and asked == [{"do": "numbers"}] * len(asked)
    lines = console.text.splitlines()
    assert len(lines) == (2 if watch else 0), "the last one stays"
    assert all("is the slowest" in line for line in lines)
