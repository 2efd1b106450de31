"""From the JSON of a flight record to what a diagnosis needs."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from ringrun.diagnosis.reports import faulthandlers_frames, read_report

LIBRARY = "/home/me/env/lib/python3.11/site-packages"
WAITING = [
    ["/home/me/train.py", 88, "train"],
    [f"{LIBRARY}/ringcomm/api.py", 150, "allreduce"],
    [f"{LIBRARY}/ringcomm/collective/runner.py", 350, "_run"],
]


def record(**changes: Any) -> Dict[str, Any]:
    content: Dict[str, Any] = {
        "type": "record", "format": 1, "reason": "asked", "rank": 1, "size": 2, "host": "jetson1",
        "error": "",
        "threads": [{"name": "MainThread", "main": True, "frames": WAITING}],
        "lanes": [{
            "name": "calls", "ordered": True, "members": [0, 1],
            "operations": [{
                "op": 812, "kind": "allreduce", "name": "conv3.grad", "what": "allreduce(…)", "at": 1.0,
                "site": "/home/me/train.py:88", "state": "running", "moved": 0,
            }],
        }],
    }  # fmt: skip
    content.update(changes)
    return content


def frames(*frames: List[Any]) -> Dict[str, Any]:
    return record(threads=[{"name": "x", "main": True, "frames": list(frames)}])


@pytest.mark.parametrize(
    ("stack", "where", "blocked"),
    [
        ([["/home/me/loader.py", 12, "load"]], "load (loader.py:12)", False),
        ([["/home/me/loader.py", 12, "<module>"]], "loader.py:12", False),
        ([["/home/me/loader.py", 12, "load"], ["/usr/lib/python3.11/threading.py", 3, "wait"]],
         "load (loader.py:12)", False),
        ([["/home/me/train.py", 4, "main"], [f"{LIBRARY}/torch/utils/data/dataloader.py", 9, "_next"]],
         "main (train.py:4), inside torch/utils/data/dataloader.py", False),
        (WAITING, "train (train.py:88)", True),
        ([*WAITING, ["/home/me/callback.py", 3, "called"]], "called (callback.py:3)", False),
        ([[f"{LIBRARY}/ringcomm/api.py", 5, "_leave_at_exit"]], "_leave_at_exit (api.py:5)", True),
        ([["/p/ringcomm/job/exits.py", 5, "hook"], ["/p/ringcomm/engine/stacks.py", 82, "_temporary"]],
         "", False),
        ([], "", False),
    ],
)  # fmt: skip
def test_where_the_program_is(stack: List[Any], where: str, blocked: bool) -> None:
    report = read_report(frames(*stack))
    assert (report.main, report.blocked) == (where, blocked)


def test_what_faulthandler_wrote() -> None:
    text = (
        "Thread 0x00007f11 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 3 in wait\n'
        "\n"
        "Current thread 0x00007f12 (most recent call first):\n"
        '  File "/home/me/spin.py", line 9 in spin\n'
        '  File "/home/me/train.py", line 4 in <module>\n'
    )
    assert faulthandlers_frames(text) == [
        ("/home/me/train.py", 4, "<module>"),
        ("/home/me/spin.py", 9, "spin"),
    ]
    silent = record(threads=[], stacks=text, reason="silent", state="R")
    assert read_report(silent).main == "spin (spin.py:9)"
    assert faulthandlers_frames("") == []
