"""Messages about a running job, and remarks about one that has succeeded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, List, Sequence

import pytest

from ringcomm.rendezvous.actions import Notice
from ringrun.job.launch import prepare
from ringrun.job.outcome import REFUSALS_SHOWN, Notices, Outcome, missing_timeline
from ringrun.plan.options import Options
from ringrun.plan.setting_sources import from_values


class Screen:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: List[str] = []

    def show(self, text: str) -> None:
        self.lines.append(text)


def notices(
    verbose: bool = False, hosts: str = "a,b", command: Sequence[str] = ("true",), **settings: Any
) -> Any:
    values = from_values(settings)
    job = prepare(Options(hosts=hosts, verbose=verbose, setting_values=values), command, {})
    screen: Any = Screen()
    return Notices(job, screen), screen.lines


def test_warnings_are_shown_and_the_rest_only_on_request() -> None:
    for verbose, shown in ((False, ["slow"]), (True, ["slow", "linked"])):
        found, lines = notices(verbose)
        for kind, text in (("warning", "slow"), ("linked", "linked"), ("ended", "")):
            found.take(Notice(kind, text))
        assert lines == shown


def test_of_many_refusals_the_first_are_shown_and_each_text_once() -> None:
    found, lines = notices()
    for number in range(REFUSALS_SHOWN + 3):
        for _ in range(2):
            found.take(Notice("refused", f"peer {number}"))
    assert len(lines) == REFUSALS_SHOWN
    assert lines[0] == "peer 0"
    assert lines[-1] == f"peer {REFUSALS_SHOWN - 1} (further ones are not shown)"


def test_the_interpreter_of_a_host_is_named_if_it_is_another_one() -> None:
    found, lines = notices(hosts="localhost,b")
    for host in found._job.hosts:
        for python in (host.python, "/other/python"):
            facts = {"event": "ready", "limits": {"unbound": ""}, "found": {"python": python}}
            assert found.ready(host, facts) is facts
        found.ready(host, {"event": "ready", "limits": {"unbound": ""}})  # the ranks run another program
    assert [line for line in lines if line] == ["b: the ranks run /other/python"]


def test_a_job_that_was_to_be_measured_and_was_not_has_failed() -> None:
    short = "No advice: the program ended without"
    for said, code, shown in (
        ([], 1, [short]),
        ([("slow", "slow")], 1, ["slow", short]),
        ([("advise", "a table")], 0, ["a table"]),
        ([("no advice", "too few steps")], 1, ["too few steps"]),
    ):
        found, lines = notices(advise=True)
        for topic, text in said:
            found.take(Notice("warning", text, detail={"topic": topic}))
        outcome = Outcome(0, "", "done")
        found.conclude(outcome)
        assert outcome.exit_code == code
        there = [line for line in lines if line]
        assert len(there) == len(shown) and all(map(str.startswith, there, shown)), there


def test_ranks_that_join_and_make_no_call_have_trained_alone() -> None:
    found, lines = notices(command=["train.py"])
    found.exited({"joined": True})
    found.conclude(Outcome(0, "", "done"))
    found.conclude(Outcome(0, "", "done"), made_no_call=True)
    assert sum("none made a collective" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "joined", "told"),
    [
        ("import ringcomm as rc\n", False, True),
        ("if True:\n    import horovod.torch as hvd\n", False, True),
        ("import ringcomm as rc\n", True, False),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", False, False),
        ("print(1)\n", False, False),
    ],
)
def test_programs_that_import_ringcomm_and_never_join_have_trained_alone(
    tmp_path: Path, text: str, joined: bool, told: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    found, lines = notices(command=[str(tmp_path / "train.py")])
    for _ in range(2):
        found.exited({"joined": joined})
    found.conclude(Outcome(0, "", "done"))
    assert any("each trained alone" in line for line in lines) is told


BEGAN_S = 1e9


@pytest.mark.parametrize(
    ("hosts", "timeline", "written_s", "is_missing"),
    [
        ("localhost,far", "trace.json", None, True),
        ("localhost,far", "trace.json", -3.0, True),
        ("localhost,far", "trace.json", -1.0, False),  # a file system may keep times in steps of two seconds
        ("localhost,far", "trace.json", 60.0, False),
        ("localhost,far", "", None, False),
        ("far,localhost", "trace.json", None, False),  # rank 0 is elsewhere
    ],
)
def test_a_timeline_that_was_requested_and_not_written_is_named(
    tmp_path: Path, hosts: str, timeline: str, written_s: Any, is_missing: bool
) -> None:
    path = tmp_path / "trace.json"
    if written_s is not None:
        path.touch()
        os.utime(path, (BEGAN_S + written_s, BEGAN_S + written_s))
    options = Options(hosts=hosts, cwd=(str(tmp_path),), setting_values=from_values({"timeline": timeline}))
    text = missing_timeline(prepare(options, ["true"], {"PATH": "/"}), BEGAN_S, [0])
    assert text.startswith(f"No timeline was written to {path}. Has rank 0 called") is is_missing
