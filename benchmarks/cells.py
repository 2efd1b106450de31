"""Cells of the tables that benchmarks/tables.py makes, and the results they are made of."""

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


def milliseconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
