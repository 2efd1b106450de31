"""Cells of tables, and the results they are made of."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

RESULTS = Path(__file__).resolve().parent / "results"
Rows = Iterator[Sequence[str]]
Rounds = Sequence[Optional[float]]
"""Seconds, one value for each round; None where the run of a round failed."""


def result(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def median(values: Rounds) -> float:
    """The median of the rounds that were measured, of which there must be one."""
    return statistics.median(value for value in values if value is not None)


def ratio(one: Rounds, other: Rounds) -> float:
    """The median of the rounds' ratios; of no round with both, the ratio of the medians."""
    pairs = [(a, b) for a, b in zip(one, other) if a is not None and b is not None]
    return median([a / b for a, b in pairs]) if pairs else median(one) / median(other)


def digits(value: float, unit: str) -> str:
    """Three digits and a unit."""
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def duration(seconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    if seconds >= 999.5e-3:
        return digits(seconds, "s")
    return digits(seconds * 1e6, "µs") if seconds < 999.5e-6 else digits(seconds * 1e3, "ms")


def size_text(size_bytes: int) -> str:
    """8 B, 64 KiB, 256 MB: whole megabytes, or else powers of two, are called what they are."""
    if size_bytes and size_bytes % 1_000_000 == 0:
        return f"{size_bytes // 1_000_000} MB"
    for unit, suffix in ((1 << 20, " MiB"), (1 << 10, " KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return f"{size_bytes} B"


def time_text(seconds: float) -> str:
    """Three digits at most, and a unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
