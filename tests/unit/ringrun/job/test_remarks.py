"""Messages about a running job, and remarks about one that has succeeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Sequence

import pytest

from ringcomm.rendezvous.membership import Notice
from ringrun.job.launch import prepare
from ringrun.job.outcome import REFUSALS_SHOWN, Notices, Outcome
from ringrun.plan.environment import from_values
from ringrun.plan.options import Options


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
        for kind, text in (("warning", "slow"), ("linked", "linked")):
            found.take(Notice(kind, text))
        assert lines == shown


def test_of_many_refusals_the_first_are_shown_and_each_text_once() -> None:
    found, lines = notices()
    for number in range(REFUSALS_SHOWN + 3):
        for _ in range(2):
            found.take(Notice("refused", f"peer {number}"))
    assert len(lines) == REFUSALS_SHOWN
    assert lines[0] == "peer 0"


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
