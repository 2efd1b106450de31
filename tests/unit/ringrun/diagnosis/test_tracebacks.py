"""Tracebacks in what ranks write to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import List

import ringcomm
from ringrun.diagnosis.tracebacks import last_traceback, without_inner_frames

TRACE = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "    f()",
    "ValueError: x",
    "more",
]
ERROR = ["ringcomm.errors.MismatchError: The ranks do not make the same call.", "rank 0: a", "  indented"]


def test_the_last_traceback_is_found() -> None:
    lines = [
        *TRACE,
        "",
        "log line",
        "Traceback (most recent call last):",
        "  File",
        "KeyError: 'y'",
        "",
        "bye",
    ]
    assert last_traceback(lines) == "Traceback (most recent call last):\n  File\nKeyError: 'y'"
    assert last_traceback(TRACE) == "\n".join(TRACE)
    assert last_traceback(["nothing"]) == ""


def test_a_long_traceback_is_shortened() -> None:
    text = last_traceback([TRACE[0], *["  File"] * 1000, "RecursionError"])
    assert len(text.splitlines()) < 50
    assert "left out" in text and text.endswith("RecursionError")


def frame(path: str) -> List[str]:
    return [f'  File "{path}", line 1, in f', "    call()", "    ^^^^^^"]


def test_frames_inside_ringcomm_are_left_out() -> None:
    inner = str(Path(ringcomm.__file__).parent / "api.py")
    sent = "/tmp/ringrun-0/ringcomm/collective/runner.py"  # of the package that ringrun has sent to a host
    user = [frame("train.py"), frame("/home/me/ringcomm/train.py"), frame("/home/me/ringcomm/examples/x.py")]
    calls = [user[0], frame(inner), user[1], user[2], frame(sent), frame("C:\\ringcomm\\errors.py")]
    lines = [TRACE[0], *(line for call in calls for line in call), *ERROR]
    assert without_inner_frames(lines) == [TRACE[0], *(line for call in user for line in call), *ERROR]


def test_all_frames_count_if_the_error_is_not_one_of_ringcomms() -> None:
    inner = frame("/lib/ringcomm/api.py")
    lines = [TRACE[0], *frame("train.py"), *inner, "TypeError: x"]
    assert without_inner_frames(lines) == lines
    lines = [TRACE[0], *inner, *ERROR]
    assert without_inner_frames(lines) == lines, "there are no others"
