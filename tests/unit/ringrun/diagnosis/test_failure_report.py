from __future__ import annotations

from typing import Any, Dict, List

import pytest

from ringrun.diagnosis.failure_report import (
    failure_box,
    host_problem,
    ranks_text,
    signal_hint,
)
from ringrun.diagnosis.first_failure import Complaint, Exit, FirstFailure

HOSTS = {0: "pc", 1: "pc", 2: "jetson1", 3: "jetson1"}
TRACE = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "    f()",
    "ValueError: x",
    "more",
]


def test_ranks() -> None:
    found = [ranks_text(ranks) for ranks in ([2], [0, 1], [3, 0, 1, 2, 7], [0, 2, 4])]
    assert found == ["rank 2", "ranks 0, 1", "ranks 0-3, 7", "ranks 0, 2, 4"]


def test_the_box() -> None:
    failure = FirstFailure()
    failure.exited(Exit(2, 3, None))
    failure.complained(Complaint(None, 2, "rank 2 was lost"))
    for rank in (0, 1, 3):
        failure.exited(Exit(rank, 1, None))
    text = failure_box(
        failure, HOSTS, ["pc", "jetson1"], {2: ["log", *TRACE], 0: [*TRACE[:3], "KeyError: 1"]}
    )
    assert text.splitlines() == [
        "╭─ ringrun: rank 2 on jetson1 failed first: exit code 3",
        *[f"│ {line}" for line in TRACE],
        "│",
        "│ Ranks 0, 1, 3 stopped because of it.",
        "╰─ exit code 3",
    ]


def mismatch(rank: int) -> List[str]:
    """Return what a rank wrote that is told of a mismatch, wherever in its program it was."""
    error = "ringcomm.errors.MismatchError: Mismatched shapes for 'a': rank 0: x; ranks 1-3: y."
    return [TRACE[0], f"  File x{rank}", error, "and more" if rank else ""]


def test_a_mismatch_is_told_once() -> None:
    failure = FirstFailure()
    failure.complained(Complaint(None, 1, "rank 1 was lost: uncaught MismatchError: …"))
    for rank in (1, 0, 2):
        failure.exited(Exit(rank, 1, None))
    failure.exited(Exit(3, None, 15, sent=15))
    read: List[bool] = []

    def diagnosis(names_calls: bool) -> str:
        read.append(names_calls)
        return "Rank 3 …"

    tails = {rank: mismatch(rank) for rank in range(3)}
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], tails, diagnosis)
    assert text.splitlines() == [
        "╭─ ringrun: the ranks do not make the same calls",
        *[f"│ {line}" for line in mismatch(1)],
        "│",
        "│ Ranks 0, 2 failed with the same error.",
        "│ Rank 3 stopped because of it.",
        "│",
        "│ Rank 3 …",
        "╰─ exit code 1",
    ]
    assert read == [True]


def test_ranks_with_the_same_bug_are_no_victims_of_each_other() -> None:
    failure = FirstFailure()
    failure.complained(Complaint(None, 1, "rank 1 was lost: uncaught ValueError: …"))
    for rank in (1, 0, 2, 3):
        failure.exited(Exit(rank, 1, None))
    tails = {
        0: ["noise", *TRACE[:3], "ValueError: another text"], 1: TRACE[:4],
        2: [TRACE[0], "  File x", "ringcomm.errors.PeerLostError: rank 1", "", "The above …", "", *TRACE[:4]],
        3: [TRACE[0], "  File y", "ValueError: x"],
    }  # fmt: skip
    lines = failure_box(failure, HOSTS, ["pc", "jetson1"], tails).splitlines()
    assert lines[-3:-1] == ["│ Rank 0 failed with the same error.", "│ Ranks 2, 3 stopped because of it."]


def test_a_module_that_one_host_lacks_is_told_with_its_interpreter() -> None:
    failure = FirstFailure()
    failure.exited(Exit(2, 1, None))
    pythons = {"pc": "/here", "jetson1": "/there/python"}
    lines = [*TRACE[:3], "ModuleNotFoundError: No module named 'torch'"]
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines}, pythons=pythons)
    assert "On jetson1 ranks run /there/python, which finds no module `torch`." in text
    assert "`/there/python -m pip install …`" in text and "--python jetson1=PATH" in text
    assert "finds no module" not in failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines})
    error = "AttributeError: 'Variable' object has no attribute 'ref'"
    other = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: [*TRACE[:-1], error]}, pythons=pythons)
    assert "finds no module" not in other and other.index(error) < other.index("-x TF_USE_LEGACY_KERAS=1")
    lines[-1] = "ModuleNotFoundError: No module named 'horovod'"
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines}, pythons=pythons)
    assert "unchanged with --horovod" in text and "pip install" not in text


@pytest.mark.parametrize(("number", "word"), [(9, "memory"), (11, "compiled code"), (15, "")])
def test_signal_hints(number: int, word: str) -> None:
    assert word in signal_hint(Exit(0, None, number))
    assert signal_hint(Exit(0, 1, None)) == ""
    assert signal_hint(Exit(0, None, number, sent=number)) == ""


FOUND = {
    "python": "/p", "version": "3.6.1", "missing": "numpy", "why": "ImportError: no", "ringcomm": "9",
    "ringcomm_at": "/r",
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"problem": "cwd"}, ["directory /x over there", "--cwd jetson1=PATH", "cwd=PATH"]),
        ({"problem": "interpreter"}, ["Python at /x over there", "--python jetson1=PATH"]),
        ({"problem": "script"}, ["script /x over there", "Copy it there"]),
        ({"problem": "program"}, ["/x is no program over there", "chmod +x"]),
        ({"problem": "program", "path": "nosuch"}, ["there is no program nosuch in PATH"]),
        ({"problem": "shadow"}, ["/x is next to", "--horovod"]),
        ({"problem": "write", "option": "--timeline", "why": "no space"},
         ["--timeline: /x cannot be written: no space"]),
        ({"problem": "start", "why": "no memory"}, ["no memory"]),
        ({"problem": "old", "found": FOUND}, ["3.6.1", "3.8"]),
        ({"problem": "missing", "found": FOUND}, ["/p cannot import numpy", "/p -m pip install numpy"]),
        ({"problem": "missing", "found": {**FOUND, "missing": "ringcomm"}}, ["Copy it, then /p."]),
        ({"problem": "version", "found": FOUND, "wanted": "1"}, ["ringcomm 9", "/r", "Copy it, then /p."]),
        ({"problem": "bytecode", "found": FOUND, "wanted": "3.11"},
         ["/p is Python 3.6.1", "from Python 3.11 here", "the same minor version", "--python jetson1=PATH"]),
        ({"problem": "check", "code": None, "signal": 4, "sent": 0, "text": "a\nb"}, ["SIGILL", "a; b"]),
        ({"problem": "check", "code": None, "signal": 9, "sent": 9, "text": ""}, ["30 s", "nothing"]),
    ],
)  # fmt: skip
def test_what_a_host_lacks(facts: Dict[str, Any], words: List[str]) -> None:
    text = host_problem("jetson1", {"path": "/x", **facts}, False, lambda python: f"Copy it, then {python}.")
    assert text.startswith("jetson1: ") and "\n" not in text
    for word in words:
        assert word in text
