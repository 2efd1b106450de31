"""What unequal ranks have cost a job, from the time that each of them has waited."""

from __future__ import annotations

from statistics import harmonic_mean
from typing import NamedTuple, Sequence

MIN_S = 5.0
"""Shorter jobs say nothing about the speed of ranks."""
_WORTH_SAYING = 0.9
"""Only if the job would have taken at most this part of the time."""


class Usage(NamedTuple):
    """The time of a rank between its first and its last collective.

    Attributes:
        elapsed_s: all of it, in seconds.
        waited_s: in collectives, moving data or waiting for other ranks.
        balanced: whether its data were divided by speed.
    """

    elapsed_s: float
    waited_s: float
    balanced: bool = False


def job_line(names: Sequence[str], usages: Sequence[Usage]) -> str:
    """Return which rank waited for which, and what the job would have taken otherwise.

    Empty if that is little.

    Equal batches are assumed. The rank that waited least waited for no other: its waiting is communication,
    which balanced batches do not shorten.

    Args:
        names: of every rank.
        usages: of every rank.

    >>> job_line(["desk", "jetson1"], [Usage(100.0, 70.0), Usage(100.0, 10.0)])[:39]
    'desk waited 70 % of the time for jetson'
    """
    if len(usages) < 2 or any(usage.balanced or usage.elapsed_s < MIN_S for usage in usages):
        return ""
    total_s = max(usage.elapsed_s for usage in usages)
    slowest = min(range(len(usages)), key=lambda rank: usages[rank].waited_s)
    longest = max(range(len(usages)), key=lambda rank: usages[rank].waited_s)
    exposed_s = usages[slowest].waited_s
    computed_s = [max(1e-9, usage.elapsed_s - usage.waited_s) for usage in usages]
    balanced = (harmonic_mean(computed_s) + exposed_s) / total_s
    others = [seconds for rank, seconds in enumerate(computed_s) if rank != slowest]
    without_s = max(others) * len(usages) / len(others) + (exposed_s if len(others) > 1 else 0.0)
    if balanced > _WORTH_SAYING:
        return ""
    waited = usages[longest].waited_s / usages[longest].elapsed_s
    return (
        f"{names[longest]} waited {100 * waited:.0f} % of the time for {names[slowest]}; balanced batches "
        f"would take {balanced:.2f} of the time, without {names[slowest]} {without_s / total_s:.2f}"
    )
