"""Tracebacks in what ranks write to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import List

import ringcomm
from ringrun.diagnosis.tracebacks import direct_cause, last_traceback, without_inner_frames

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
        "Exception ignored in: <function f>",
        "Traceback (most recent call last):",
        "TypeError: at the end of Python",
    ]
    assert last_traceback(lines) == "Traceback (most recent call last):\n  File\nKeyError: 'y'"
    assert last_traceback(TRACE) == "\n".join(TRACE)
    assert last_traceback(["nothing"]) == ""


def test_a_long_traceback_is_shortened() -> None:
    text = last_traceback([TRACE[0], *["  File"] * 1000, "RecursionError"])
    assert len(text.splitlines()) < 50
    assert "left out" in text and text.endswith("RecursionError")


def test_an_error_goes_on_after_an_empty_line() -> None:
    error = [
        "TypeError: in user code:",
        "",
        '    File "train.py", line 12, in step',
        "",
        "    TypeError: really",
    ]
    assert last_traceback([*TRACE, "", *TRACE[:3], *error, ""]) == "\n".join([*TRACE[:3], *error])
    long = last_traceback(
        [*TRACE[:3], error[0], *["", "  more"] * 500, "Node: 'MatMul'", "shapes do not match"]
    )
    assert error[0] in long and long.endswith("shapes do not match") and len(long.splitlines()) < 60


def test_the_place_of_a_cause_is_the_programs_line() -> None:
    caused = "The above exception was the direct cause of the following exception:"
    thread = ['  File "/usr/lib/python3.11/threading.py", line 982, in run', "    self._target()"]
    first = [TRACE[0], *frame("train.py"), *thread, "KeyError: 1", "", "    more"]
    text = direct_cause([*first, "", caused, "", TRACE[0], *frame("x.py"), "ValueError: 2"])
    assert text.startswith("KeyError: 1\n") and "more" in text
    assert text.endswith('File "train.py", line 1, in f') and "threading.py" not in text


def frame(path: str) -> List[str]:
    return [f'  File "{path}", line 1, in f', "    call()", "    ^^^^^^"]


def test_frames_inside_ringcomm_are_left_out() -> None:
    inner = str(Path(ringcomm.__file__).parent / "api.py")
    sent = "/tmp/ringrun-0/ringcomm/collective/runner.py"  # of the package that ringrun has sent to a host
    user = [frame("train.py"), frame("/home/me/ringcomm/train.py"), frame("/home/me/ringcomm/examples/x.py")]
    calls = [user[0], frame(inner), user[1], user[2], frame(sent), frame("C:\\ringcomm\\errors.py")]
    lines = [TRACE[0], *(line for call in calls for line in call), *ERROR]
    assert without_inner_frames(lines) == [TRACE[0], *(line for call in user for line in call), *ERROR]
