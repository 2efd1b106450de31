"""Python tracebacks on the stderr of ranks. Pure, except that it looks at ringcomm's files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Sequence, Tuple

import ringcomm

from .reports import is_users

MAX_LINES = 40
"""Above this the report leaves out the middle of the frames, and of the error."""
ERRORS = "ringcomm.errors."
"""The beginning of a traceback's last line if ringcomm raised the error."""

_HEAD = "Traceback (most recent call last):"
_GROUP = "  + Exception Group Traceback (most recent call last):"
_IGNORED = "Exception ignored "
_CAUSED = "The above exception was the direct cause"
_FRAME = re.compile(r'  File "(?:.*[/\\])?ringcomm[/\\]([^"]+)", line \d+, in ')
_FILE = re.compile(r'  File "([^"]+)", line \d+')
_PACKAGE = Path(ringcomm.__file__).parent


def _starts(lines: Sequence[str]) -> List[int]:
    """Return the indices at which tracebacks begin, without those of errors that Python has ignored."""
    return [
        index for index, line in enumerate(lines)
        if line.startswith((_HEAD, _GROUP)) and not (index and lines[index - 1].startswith(_IGNORED))
    ]  # fmt: skip


def traceback_lines(lines: Sequence[str]) -> List[str]:
    """Return the lines of the last traceback on a rank's stderr, or none. The error ends the program, so the
    lines after it are its text, in which TensorFlow has empty lines.
    """
    starts = _starts(lines)
    if not starts:
        return []
    first = starts[-1]
    ignored = (index for index in range(first, len(lines)) if lines[index].startswith(_IGNORED))
    return list(lines[first : next(ignored, len(lines))])


def _parts(lines: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Return the frames of a traceback, with its first line, and the error, without final empty lines."""
    texts = (index for index, line in enumerate(lines) if index and not line.startswith((" ", "\t")))
    split = next(texts, len(lines))
    error = list(lines[split:])
    while error and not error[-1].strip():
        error.pop()
    return list(lines[:split]), error


def _shortened(lines: Sequence[str], most: int = MAX_LINES) -> List[str]:
    """Return the lines, without the middle if there are more than `most`."""
    if len(lines) <= most:
        return list(lines)
    half = most // 2
    return [*lines[:half], f"  … {len(lines) - 2 * half} lines left out …", *lines[-half:]]


def _place(frames: Sequence[str]) -> str:
    """Return the innermost frame of the program, or else the innermost frame."""
    files = [line for line in frames if line.startswith("  File ")]
    own = [line for line in files if (found := _FILE.match(line)) and is_users(found[1])]
    return (own or files or [""])[-1].strip()


def direct_cause(lines: Sequence[str]) -> str:
    """Return the first error in the chain that led to the last traceback's, with its place; or ""."""
    starts = _starts(lines)
    chosen = len(starts) - 1
    while chosen > 0 and any(line.startswith(_CAUSED) for line in lines[starts[chosen - 1] : starts[chosen]]):
        chosen -= 1
    if chosen in (-1, len(starts) - 1):
        return ""
    part = lines[starts[chosen] : starts[chosen + 1]]
    frames, error = _parts([line for line in part if not line.startswith(_CAUSED)])
    return "\n  ".join(filter(None, [*_shortened(error, MAX_LINES // 2), _place(frames)])) if error else ""


def last_traceback(lines: Sequence[str]) -> str:
    """Return the last traceback in these lines, shortened, or ""."""
    frames, error = _parts(traceback_lines(lines))
    return "\n".join([*_shortened(frames), *_shortened(error)]).rstrip()


def last_error(lines: Sequence[str]) -> str:
    """Return the first line of the last traceback's error; without one the last line; or ""."""
    errors = (line for line in traceback_lines(lines)[1:] if not line.startswith((" ", "\t")))
    return next(errors, "") or next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_shown_whole(lines: Sequence[str]) -> bool:
    """Return whether :func:`last_traceback` is complete."""
    return all(len(part) <= MAX_LINES for part in _parts(traceback_lines(lines)))


def without_inner_frames(lines: Sequence[str]) -> List[str]:
    """Return a traceback without the frames inside ringcomm, if it ends in an error of
    :mod:`ringcomm.errors`. Such an error is about the program that called ringcomm; another one may be a
    defect of ringcomm, for which all frames count.
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
    """Return the first line of ringcomm's error in which the last traceback ends, or ""."""
    ends = (line for line in traceback_lines(lines) if line.startswith(ERRORS))
    return next(ends, "")


def origin(lines: Sequence[str]) -> Tuple[str, str]:
    """Return the innermost frame and the class of the last traceback; ("", "") without one, or if ringcomm
    raised an error in it, which may be another rank's fault.
    """
    frames, error = _parts(traceback_lines(lines))
    files = [line for line in frames if line.startswith("  File ")]
    if not files or any(line.startswith(ERRORS) for line in lines):
        return "", ""
    return files[-1], error[0].partition(":")[0] if error else ""
