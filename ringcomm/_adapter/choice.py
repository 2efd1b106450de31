"""``compression="auto"``: predict from measurements which compression makes a training step shortest.

All ranks first train some steps without compression and time them. Then they exchange the slowest rank's
times, so all have the same numbers and make the same choice. The predictions are

    wait    = time of sending beyond the backward pass, from which each reduction's start is known
    step    = computing + encoding and decoding + wait

with codec rates measured here and the link rates measured when the job started, corrected so that they
explain the wait of the timed steps. Compression is chosen only for a predicted gain of at least 5 %, and
nothing lossier than int8 with error feedback.

Later all ranks check now and then how fast the links are, from the time that the reductions of a step took.
If that has changed they choose again. In a new view of an elastic job they start over.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, number_of, size_of
from ..collective.measure import Rates, code_s, measured_rates
from ..configuration.settings import use
from ..errors import ConfigError
from ..ops import ReduceOp
from ..schedule.cost import CostModel, Machine, best_allreduce, grid
from .compression import Compression, compressor_of

logger = logging.getLogger(__name__)

MIN_GAIN = 0.05
STEPS = 6  # steps without compression before the choice; the first is not timed
AGAIN = 50  # steps between two checks of the links, after the choice
CHANGED = 1.5  # least factor of a change of the links for another choice
COMPRESSORS = {"none": Compression.none, "bf16": Compression.bf16, "int8": Compression.int8}
_MAX_CHANGE = 4096.0
_MAX_ERROR = 2.0  # largest error of the links' calibration; a longer wait is not due to bytes


class StepTime(NamedTuple):
    """A training step without compression, in seconds."""

    period_s: float  # from the end of one step to the end of the next
    wait_s: float  # of that, waiting for reductions after the backward pass
    overlap_s: float  # from the first reduction's start to the end of the backward pass
    # of each reduction: seconds after the first one, and float32 bytes; empty: all at once
    arrivals: Tuple[Tuple[float, float], ...] = ()


class Links(NamedTuple):
    """The network as a gradient sees it."""

    size: int
    local_size: int  # ranks per host
    byte_s: float  # per byte of the slowest interface, each way
    latency_s: float  # of a message


class Choice(NamedTuple):
    """The chosen compression, and the predicted seconds per step."""

    name: str
    steps_s: Dict[str, float]  # by name

    def describe(self) -> str:
        """Return the choice in one line, like ``int8: step 1.90 s -> 1.10 s predicted``."""
        plain, others = self.steps_s["none"], {k: v for k, v in self.steps_s.items() if k != "none"}
        best = min(others, key=lambda name: others[name])
        if self.name == "none":
            return f"none: step {plain:.3g} s, {best} {others[best]:.3g} s predicted, a gain of less than 5 %"
        return f"{self.name}: step {plain:.3g} s -> {self.steps_s[self.name]:.3g} s predicted"


def links_of(model: Optional[CostModel], size: int) -> Links:
    """Return the network of a job, from its calibration; a fast one if nothing was measured."""
    if model is None or size < 2:
        return Links(size, 1, 0.25e-9, 20e-6)
    if not model.hosts:
        return Links(size, size, model.byte_s, model.latency_s)
    local = max(model.hosts.count(host) for host in set(model.hosts))
    return Links(size, local, max(model.wire_byte_s), model.wire_latency_s)


def send_s(name: str, nbytes: float, links: Links) -> float:
    """Return the seconds of an all-reduce of gradients of ``nbytes`` in float32."""
    hosts = grid(links.size, [links.local_size])
    machine = Machine(
        (links.byte_s,), links.latency_s, links.byte_s, links.latency_s, reduce_byte_s=0.0, message_s=0.0
    )
    return best_allreduce(nbytes, machine, hosts, "float32" if name == "none" else name)[1]


def exposed_s(name: str, nbytes: float, step: StepTime, links: Links) -> float:
    """Return the time of sending beyond the backward pass; reductions run one after the other."""
    return _exposed_s(step, _reductions(name, nbytes, step, links))


def _reductions(name: str, nbytes: float, step: StepTime, links: Links) -> List[Tuple[float, float]]:
    """Return the start of each reduction of a step, and the seconds that the network needs for it."""
    return [(at_s, send_s(name, part, links)) for at_s, part in step.arrivals or ((0.0, nbytes),)]


def _exposed_s(step: StepTime, reductions: Sequence[Tuple[float, float]], factor: float = 1.0) -> float:
    """Return the wait for these reductions if links take ``factor`` times as long."""
    end_s = 0.0
    for started_s, sent_s in reductions:
        end_s = max(end_s, started_s) + factor * sent_s
    return max(0.0, end_s - step.overlap_s)


def fitted(name: str, nbytes: int, step: StepTime, links: Links, most: float = _MAX_CHANGE) -> Links:
    """Return the links with which a step with this compression waits as long as it did.

    If it has not waited at all: the slowest links with which it would not have. So from a compression that
    hides everything there is no way back to float32, which may not. ``links`` is the present estimate, which
    stays if it explains the wait to 5 % of the step; it changes at most by the factor ``most``. ``nbytes`` is
    the size of all gradients in float32, and ``step`` the slowest rank's.
    """
    reductions = _reductions(name, nbytes, step, links)
    if abs(_exposed_s(step, reductions) - step.wait_s) <= 0.05 * step.period_s:
        return links
    low, high = 1 / most, most
    for _ in range(40):
        middle = (low * high) ** 0.5
        if _exposed_s(step, reductions, middle) <= step.wait_s:
            low = middle
        else:
            high = middle
    return links._replace(byte_s=links.byte_s * low, latency_s=links.latency_s * low)


def choose(nbytes: int, step: StepTime, links: Links, rates: Dict[str, Rates]) -> Choice:
    """Return the compression with the shortest predicted step; ``nbytes`` is that of float32."""
    computing_s = max(0.0, step.period_s - step.wait_s)
    steps_s = {}
    for name in COMPRESSORS:
        coding_s = code_s(nbytes, links.size, rates.get(name))
        steps_s[name] = computing_s + coding_s + exposed_s(name, nbytes, step, links)
    best = min(steps_s, key=lambda name: steps_s[name])
    gains = steps_s[best] <= (1 - MIN_GAIN) * steps_s["none"]
    return Choice(best if gains else "none", steps_s)


def choose_again(
    name: str, nbytes: int, step: StepTime, links: Links, rates: Dict[str, Rates]
) -> Tuple[Links, Optional[Choice]]:
    """Return the links that a step with a compression shows, and another choice if they have changed."""
    changed = fitted(name, nbytes, step, links)
    if links.byte_s / CHANGED <= changed.byte_s <= links.byte_s * CHANGED:
        return links, None
    plain = step._replace(period_s=step.period_s - code_s(nbytes, links.size, rates.get(name)))
    choice = choose(nbytes, plain, changed, rates)
    return changed, choice if choice.name != name else None


class AutoCompression:
    """Time the first steps of an optimizer, then choose for all ranks."""

    kind = "auto"

    def __init__(self, process_set: ProcessSet) -> None:
        self.chosen: Any = Compression.none
        self.choice: Optional[Choice] = None  # the prediction, once it is chosen
        self._process_set = process_set
        self._steps: List[StepTime] = []
        self._first_s = 0.0
        self._last_end_s = 0.0
        self._arrivals: List[Tuple[float, float]] = []
        self._context: Any = None
        self._links = Links(1, 1, 0.0, 0.0)
        self._rates: Dict[str, Rates] = {}
        self._other_s = 0.0  # of a step's wait what does not depend on the bytes

    def current(self) -> Any:
        """Return the compressor in use; none in a new view of the job until all ranks have chosen again."""
        context = api.context()
        if context is not self._context:
            if self._context is not None:
                self.restart()
            self._context = context
        return self.chosen

    def submitting(self, nbytes: float) -> None:
        """Record that a reduction of ``nbytes`` of float32 is about to start."""
        now_s = time.perf_counter()
        if not self._first_s:
            self._first_s = now_s
            self._arrivals.clear()
        self._arrivals.append((now_s - self._first_s, nbytes))

    def finished(self, nbytes: int, waited_from_s: float) -> bool:
        """Take the end of a step's reductions; return whether :attr:`chosen` has changed.

        It chooses after some steps, and checks the links now and then. ``nbytes`` is the size of all
        gradients in float32; ``waited_from_s`` is when this rank began to wait, by ``time.perf_counter()``.
        """
        now_s = time.perf_counter()
        if self._last_end_s:  # also a step in which this rank reduced nothing: all ranks count the same steps
            overlap_s = max(0.0, waited_from_s - self._first_s) if self._first_s else 0.0
            arrivals = tuple(self._arrivals) if self._first_s else ()
            self._steps.append(StepTime(now_s - self._last_end_s, now_s - waited_from_s, overlap_s, arrivals))
        self._first_s, self._last_end_s = 0.0, now_s
        if len(self._steps) < (STEPS if self.choice is None else AGAIN):
            return False
        step, nbytes = self._agree(nbytes)
        self._steps.clear()
        self._last_end_s = time.perf_counter()
        return self._look_again(nbytes, step) if self.choice is not None else self._choose(nbytes, step)

    def _choose(self, nbytes: int, step: StepTime) -> bool:
        measured = links_of(api.context().cost_model, size_of(self._process_set))
        self._links = fitted("none", nbytes, step, measured, _MAX_ERROR)
        self._other_s = max(0.0, step.wait_s - exposed_s("none", nbytes, step, self._links))
        step = step._replace(wait_s=step.wait_s - self._other_s)
        choice = self.choice = choose(nbytes, step, self._links, self._rates)
        self.chosen = COMPRESSORS[choice.name]
        if api.rank() == 0:
            logger.warning("compression=auto chooses %s", choice.describe())
        return choice.name != "none"

    def _look_again(self, nbytes: int, step: StepTime) -> bool:
        step = step._replace(wait_s=max(0.0, step.wait_s - self._other_s))
        links, choice = choose_again(self.chosen.kind, nbytes, step, self._links, self._rates)
        faster, self._links = links.byte_s < self._links.byte_s, links
        if choice is None:
            return False
        self.choice, self.chosen = choice, COMPRESSORS[choice.name]
        if api.rank() == 0:
            what = "faster" if faster else "slower"
            logger.warning("compression=auto: links are %s now, and it chooses %s", what, choice.describe())
        return True

    def restart(self) -> None:
        """Measure and choose again; on all ranks, before the same step."""
        self.chosen, self.choice = Compression.none, None
        self._steps, self._first_s, self._last_end_s = [], 0.0, 0.0

    def _agree(self, nbytes: int) -> Tuple[StepTime, int]:
        """Return the slowest rank's times and the most bytes, and keep its codecs' rates: alike on all."""
        own = [sorted(item)[len(self._steps) // 2] for item in zip(*(step[:3] for step in self._steps))]
        arrivals: Sequence[Tuple[float, float]] = self._steps[-1].arrivals
        rates = measured_rates() if self.choice is None else self._rates
        flat = [value for name in sorted(rates) for value in rates[name]]
        # A rank that had no gradient for a bucket, or divided one, had another number of reductions.
        most, nbytes = map(int, self._maximum([len(arrivals), nbytes], "ringcomm.auto.reductions"))
        if arrivals:
            arrivals = [arrivals[place * len(arrivals) // most] for place in range(most)]
        else:
            arrivals = [(0.0, 0.0)] * most
        # The shortest overlap and the shortest wait count: the rank that waits longest has computed least.
        starts, sizes = ([item[place] for item in arrivals] for place in (0, 1))
        numbers = self._maximum([own[0], -own[1], -own[2], *flat, *starts, *sizes], "ringcomm.auto")
        last = 3 + len(flat)
        pairs = zip(numbers[3:last:2], numbers[4:last:2])
        self._rates = {name: Rates(*pair) for name, pair in zip(sorted(rates), pairs)}
        together = zip(numbers[last : last + most], numbers[last + most :])
        return StepTime(numbers[0], -numbers[1], -numbers[2], tuple(together)), nbytes

    def _maximum(self, numbers: Sequence[float], name: str) -> List[float]:
        """Return the largest of each number over the ranks, which must give equally many."""
        array = np.array(numbers, np.float64)
        api.context().engine.allreduce(
            [array], ReduceOp.MAX, name, process_set=number_of(self._process_set), urgent=True
        ).wait()
        return [float(number) for number in array]


def configured(compression: Any, process_set: ProcessSet) -> Any:
    """Return the compressor for a program's argument; for ``Compression.none`` the settings decide."""
    if compression is Compression.none and api.is_initialized():
        compression = api.placed().settings.compression or compression
        use("compression")
    if compression == "auto":
        return AutoCompression(process_set)
    return compressor_of(compression)


def refuse_local_steps() -> None:
    """Raise ConfigError if the settings ask for local steps, which the optimizer cannot make."""
    if api.is_initialized() and api.placed().settings.local_steps:
        raise ConfigError(
            "--local-steps (RINGCOMM_LOCAL_STEPS) works with PyTorch's DistributedOptimizer only. Leave it "
            "out."
        )
