"""Python tracebacks in what ranks write to stderr. Pure, but for a look at the files of ringcomm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Sequence, Tuple

import ringcomm

MAX_LINES = 40
"""Of a longer traceback the report leaves out the middle."""
ERRORS = "ringcomm.errors."
"""What the last line of a traceback begins with if ringcomm has raised it."""

_HEAD = "Traceback (most recent call last):"
_CAUSED = "The above exception was the direct cause"
_FRAME = re.compile(r'  File "(?:.*[/\\])?ringcomm[/\\]([^"]+)", line \d+, in ')
_PACKAGE = Path(ringcomm.__file__).parent


def traceback_lines(lines: Sequence[str]) -> List[str]:
    """The lines of the last traceback in what a rank wrote to stderr; none if there is no traceback."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_HEAD)]
    if not starts:
        return []
    found = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        inside = line.startswith((" ", "\t"))
        if not inside and not line and not found[-1].startswith((" ", "\t", _HEAD)):
            break
        found.append(line)
    return found


def direct_cause(lines: Sequence[str]) -> str:
    """The error from which the last traceback's was raised, with its place; of a chain the first; or ""."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_HEAD)]
    chosen = len(starts) - 1
    while chosen > 0 and any(line.startswith(_CAUSED) for line in lines[starts[chosen - 1] : starts[chosen]]):
        chosen -= 1
    if chosen in (-1, len(starts) - 1):
        return ""
    found = traceback_lines(lines[: starts[chosen + 1]])
    frames = [line.strip() for line in found if line.startswith("  File ")]
    error = next((line for line in found[1:] if not line.startswith((" ", "\t"))), "")
    return "\n  ".join([error, *frames[-1:]]) if error else ""


def last_traceback(lines: Sequence[str]) -> str:
    """The last traceback in these lines, or ""; of a long one not the middle."""
    found = traceback_lines(lines)
    if len(found) > MAX_LINES:
        left_out = len(found) - MAX_LINES
        half = MAX_LINES // 2
        found = [*found[:half], f"  … {left_out} lines left out …", *found[-half:]]
    return "\n".join(found).rstrip()


def last_error(lines: Sequence[str]) -> str:
    """The error of the last traceback in these lines, its first line; without one the last line; or ""."""
    errors = (line for line in traceback_lines(lines)[1:] if not line.startswith((" ", "\t")))
    return next(errors, "") or next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_shown_whole(lines: Sequence[str]) -> bool:
    """Return whether nothing of the last traceback in these lines is left out."""
    return len(traceback_lines(lines)) <= MAX_LINES


def without_inner_frames(lines: Sequence[str]) -> List[str]:
    """A traceback without the frames inside ringcomm, if it ends in an error of :mod:`ringcomm.errors`.

    Such an error says what is wrong with the program that called ringcomm; any other one may be a defect of
    ringcomm, for which all frames count.

    Args:
        lines: of the traceback; see :func:`traceback_lines`.
    """
    if not shared_error(lines):
        return list(lines)
    left: List[str] = []
    inner = False
    for line in lines:
        if line.startswith("  File "):
            found = _FRAME.match(line)
            # The path of a user's own folder may contain the word, too.
            inner = found is not None and (_PACKAGE / found[1].replace("\\", "/")).is_file()
        elif not line.startswith((" ", "\t")):
            inner = False
        if not inner:
            left.append(line)
    return left if any(line.startswith("  File ") for line in left) else list(lines)


def shared_error(lines: Sequence[str]) -> str:
    """The first line of the error of ringcomm in which the last traceback ends, or "".

    All ranks that raise it for the same reason read the same.
    """
    ends = (line for line in traceback_lines(lines) if line.startswith(ERRORS))
    return next(ends, "")


def origin(lines: Sequence[str]) -> Tuple[str, str]:
    """Return where and with which class the last traceback ends, or ("", "") without one.

    The same if ringcomm has raised anything there: such errors may be another rank's fault.
    """
    found = traceback_lines(lines)
    frames = [line for line in found if line.startswith("  File ")]
    error = next((line for line in found[1:] if not line.startswith((" ", "\t"))), "")
    if not frames or any(line.startswith(ERRORS) for line in lines):
        return "", ""
    return frames[-1], error.partition(":")[0]
