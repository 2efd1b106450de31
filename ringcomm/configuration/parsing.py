"""Parsers for settings as text: sizes, durations, switches and choices.

Each returns the value, or raises ``ValueError`` with the valid values; the caller adds the setting's name.
"""

from __future__ import annotations

import math
import sys
from typing import Callable, Iterable


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _within(low: float, high: float, problem: str) -> Callable[[str], float]:
    """Return a parser of numbers from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = _real(text)
        if not low <= value <= high:
            raise ValueError(problem)
        return value

    return parse


def _one_of(words: Iterable[str], empty: bool = False) -> Callable[[str], str]:
    """Return a parser of one of these words, or of "" if ``empty``."""

    def parse(text: str) -> str:
        if text not in words and (text or not empty):
            raise ValueError(f"must be {'empty or ' if empty else ''}one of {', '.join(words)}")
        return text

    return parse


_MAX = sys.float_info.max
positive_seconds = _within(sys.float_info.min, math.inf, "must be more than zero seconds")
seconds = _within(0, _MAX, "must be zero or more seconds")


def size(text: str) -> int:
    """Parse bytes: ``262144``, ``256K``, ``256KiB`` or ``1M``."""
    digits = text.strip().lower()
    for suffix in ("ib", "b"):
        if digits.endswith(suffix):
            digits = digits[: -len(suffix)]
            break
    factor = 1
    if digits and digits[-1] in "kmg":
        factor = 1024 ** ("kmg".index(digits[-1]) + 1)
        digits = digits[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError("must be a number of bytes like 65536, 64K or 1M, and at least 1")
    return int(digits) * factor


def size_or_zero(text: str) -> int:
    """Parse :func:`size`, or ``0``, which has a special meaning."""
    if text.strip() == "0":
        return 0
    try:
        return size(text)
    except ValueError:
        raise ValueError("must be a number of bytes like 65536, 64K or 1M, or 0") from None


def flag(text: str) -> bool:
    """Parse ``1``, ``0``, or a word for them."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


def threads(text: str) -> str:
    """Accept ``auto``, ``none``, or a whole number from 1."""
    word = text.strip().lower()
    if word not in ("auto", "none") and not (word.isdecimal() and int(word)):
        raise ValueError("must be auto, none, or a whole number from 1")
    return word


TRANSPORTS = ("auto", "memory", "shm", "unix", "tcp")
transport = _one_of(TRANSPORTS)


# The all-reduce algorithms, and the modules of ringcomm.schedule that register them. A new algorithm is added
# to this table; ringcomm.schedule.select imports the modules.
ALGORITHMS = {
    "one_shot": "direct",
    "direct": "direct",
    "doubling": "doubling",
    "ring": "ring",
    "hierarchical": "hierarchy",
}


COMPRESSIONS = ("none", "fp16", "bf16", "int8", "int4", "auto")
compression = _one_of(COMPRESSIONS, empty=True)


def local_steps(text: str) -> str:
    """Accept ``auto``, a number from 1, or nothing."""
    if text not in ("", "auto") and not (text.isdecimal() and int(text)):
        raise ValueError("must be empty, auto, or a number from 1 on")
    return text
