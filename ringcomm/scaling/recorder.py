"""``ringrun --predict``: records the reductions of a program's steps, and finds out how long it computes.

Reductions repeat from step to step, so the shortest period of their names and lengths is the step. Everything
is decided by counts of reductions, which are the same on all ranks, and never by times.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

from ..clock import Clock, monotonic
from .step import Workload

WARM_UP = 3
"""Steps that do not count: compilers compile, and caches fill."""
STEPS = 10
"""Steps that are measured."""
_FIRST_CHECK = WARM_UP + STEPS + 1
_FIRST_CHECK_UNNAMED = 26
"""Without names, gradients of equal length that follow each other look like steps."""
_MAX_EVENTS = 1 << 16
TOLERATED = 0.15
"""Beyond this error for the ranks that were measured, what is predicted for others is only a bound."""
AT_MOST, AT_LEAST = "at most", "at least"
_BUSY, _UNEVEN = 0.1, 0.25


class Event(NamedTuple):
    """A reduction is requested.

    Attributes:
        at_s: when, by this rank's clock.
        waited_s: seconds that the program has waited for collectives until then.
        nbytes: length.
        blocking: whether the program waits for it at once, so that nothing can be computed beside it.
        name: as the program named it; may be empty.
    """

    at_s: float
    waited_s: float
    nbytes: int
    blocking: bool
    name: str


class Measured(NamedTuple):
    """The steps of one rank.

    Attributes:
        compute_s: median of a step's time, without waiting.
        gradients: bytes of each reduction of a step, in their order.
        ready_s: when each is requested, in seconds of computation since the step began.
        blocking: whether the program waits for each before it requests the next.
        step_s: median of a step's time, with waiting.
        spread: by which part of that the middle half of the steps differ.
    """

    compute_s: float
    gradients: Tuple[int, ...]
    ready_s: Tuple[float, ...]
    blocking: bool = False
    step_s: float = 0.0
    spread: float = 0.0


class StepRecorder:
    """Takes a program's reductions until it has seen enough steps.

    Args:
        waited_s: how long the program has waited for collectives so far, in seconds.
        finished: called with the result, in the thread that requests the reduction after the last step.
        clock: seconds.

    Attributes:
        seen: number of reductions.
    """

    def __init__(
        self, waited_s: Callable[[], float], finished: Callable[[Measured], None], clock: Clock = monotonic
    ) -> None:
        self.seen = 0
        self._waited_s = waited_s
        self._finished = finished
        self._clock = clock
        self._events: List[Event] = []
        self._check_at = _FIRST_CHECK
        self._over = False

    def requested(self, nbytes: int, blocking: bool, name: str) -> None:
        """A reduction of so many bytes is requested."""
        if self._over:
            return
        self.seen += 1
        self._events.append(Event(self._clock(), self._waited_s(), nbytes, blocking, name))
        if len(self._events) < (self._check_at if name else max(self._check_at, _FIRST_CHECK_UNNAMED)):
            return
        length = period([(event.name, event.nbytes) for event in self._events])
        if length and len(self._events) > (WARM_UP + STEPS) * length:
            self._over = True
            events, self._events = self._events, []
            self._finished(measured(events[-STEPS * length - 1 :], length))
        else:
            self._check_at = max(len(self._events) + 1, (WARM_UP + STEPS) * length + 1)
            if not length:
                self._check_at = min(_MAX_EVENTS, 2 * len(self._events))
            self._over = len(self._events) >= _MAX_EVENTS


def period(items: Sequence[Any]) -> int:
    """The smallest p for which the last three times p items repeat, and the last two thirds of all.

    >>> period([5, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    3
    >>> period([1, 2, 3, 4])
    0
    """
    backwards = list(reversed(items))
    for candidate in range(1, len(backwards) // 3 + 1):
        span = max(3 * candidate, 2 * len(backwards) // 3)
        if backwards[: span - candidate] == backwards[candidate:span]:
            return candidate
    return 0


def measured(events: Sequence[Event], length: int) -> Measured:
    """The typical step of so many reductions, from those of several steps and the first of the next one."""
    steps = [events[first : first + length + 1] for first in range(0, len(events) - length, length)]
    compute_s = median(_computed_s(step[0], step[-1]) for step in steps)
    delays = [median(_computed_s(step[0], step[place]) for step in steps) for place in range(length)]
    # What is computed after the last gradient of a step comes before the first one of the next.
    before_s = compute_s - delays[-1]
    ready_s, latest_s = [], 0.0
    for event, delay_s in zip(steps[0][:length], delays):
        latest_s = compute_s if event.blocking else min(compute_s, max(latest_s, before_s + delay_s))
        ready_s.append(latest_s)
    own = steps[0][:length]
    blocking = all(event.blocking for event in own)
    times_s = sorted(step[-1].at_s - step[0].at_s for step in steps)
    step_s, quarter = median(times_s), len(times_s) // 4
    spread = (times_s[-1 - quarter] - times_s[quarter]) / max(step_s, 1e-9)
    lengths = tuple(event.nbytes for event in own)
    return Measured(compute_s, lengths, tuple(ready_s), blocking, step_s, spread)


def _computed_s(earlier: Event, later: Event) -> float:
    return max(1e-9, later.at_s - earlier.at_s - (later.waited_s - earlier.waited_s))


def workload_of(own: Measured, compute_s: Sequence[float], bucket_bytes: int) -> Workload:
    """The step of a job, of which this rank's gradients are known and all ranks' computing times.

    Args:
        own: this rank's.
        compute_s: of every rank.
        bucket_bytes: gradients are reduced together up to so many bytes.
    """
    slowest_s, usual_s = max(compute_s), median(compute_s)
    stretched = tuple(at_s * slowest_s / own.compute_s for at_s in own.ready_s)
    return Workload(slowest_s, own.gradients, stretched, usual_s, 0 if own.blocking else bucket_bytes)


def description(own: Measured, compute_s: Sequence[float], hosts: Sequence[str], expected_s: float) -> str:
    """Return what was measured, in one line.

    Args:
        own: this rank's steps.
        compute_s: of every rank.
        hosts: of every rank.
        expected_s: what the model says of a step of these ranks.
    """
    slowest = max(range(len(compute_s)), key=lambda rank: compute_s[rank])
    count, megabytes = len(own.gradients), sum(own.gradients) / 1e6
    hidden = sum(nbytes for nbytes, at_s in zip(own.gradients, own.ready_s) if at_s < 0.98 * own.compute_s)
    text = (
        f"measured a step of {own.step_s:.4g} s (the model says {expected_s:.4g} s) with "
        f"{median(compute_s):.4g} s of computation and {_reductions(count)} of {megabytes:.4g} MB together; "
        f"{100 * hidden / sum(own.gradients):.0f} % of them begin before the computation ends"
    )
    if compute_s[slowest] > 1.1 * median(compute_s):
        text += f"; rank {slowest} on {hosts[slowest]} needs {compute_s[slowest]:.4g} s"
    return text


def error_of(own: Measured, expected_s: float) -> float:
    """The error of the model for a step of these ranks, as a part of the measured time."""
    return expected_s / own.step_s - 1.0 if own.step_s else 0.0


def doubt(
    own: Measured,
    compute_s: Sequence[float],
    waited: Sequence[float],
    hosts: Sequence[str],
    expected_s: float,
) -> Tuple[str, str]:
    """Return what there is to say first if the model is wrong for the ranks that were measured.

    Args:
        own: this rank's steps.
        compute_s: of every rank.
        waited: the part of its time in which each rank waited for a processor.
        hosts: of every rank.
        expected_s: what the model says of a step of these ranks.

    Returns:
        the text, and whether steps take ``at most`` or ``at least`` as long as the model says; both are empty
        if it is right within :data:`TOLERATED`.
    """
    error = error_of(own, expected_s)
    if abs(error) <= TOLERATED:
        return "", ""
    why = []
    slowest = max(range(len(compute_s)), key=lambda rank: compute_s[rank])
    if compute_s[slowest] > 1.1 * median(compute_s):
        why.append(
            f"the ranks wait for rank {slowest} on {hosts[slowest]}, which computes "
            f"{compute_s[slowest]:.4g} s (median {median(compute_s):.4g} s)"
        )
    busiest = max(range(len(waited)), key=lambda rank: waited[rank])
    if waited[busiest] > _BUSY:
        why.append(
            f"rank {busiest} on {hosts[busiest]} waits for a processor for {waited[busiest]:.0%} of its "
            "time: other programs, or more threads than cores"
        )
    if own.spread > _UNEVEN:
        why.append(f"steps differ: the middle half by {own.spread:.0%}")
    bound = AT_MOST if error > 0 else AT_LEAST
    return (
        f"the model is {abs(error):.0%} off for these ranks ({expected_s:.4g} s a step, measured "
        f"{own.step_s:.4g} s). {_sentence(why)} So the rows below are bounds: steps take {bound} as long"
    ), bound


def _sentence(why: Sequence[str]) -> str:
    return f"Perhaps because {'; '.join(why)}." if why else "What it leaves out is not known."


def _reductions(count: int) -> str:
    return f"{count} reduction{'' if count == 1 else 's'}"


def missing(seen: int) -> str:
    """Why nothing was predicted for a program that has ended after so many reductions."""
    if not seen:
        return (
            "No prediction: the program reduced no gradients. With one rank frameworks reduce nothing; start "
            "at least two ranks."
        )
    return (
        f"No prediction: the program ended after {_reductions(seen)}. It must make {WARM_UP + STEPS} equal "
        "steps, and its reductions must be the same in every step."
    )
