"""``compression="auto"``: which compression makes a training step shortest, from what was measured.

All ranks first train some steps without compression and time them. Then they exchange the slowest rank's
times, so all have the same numbers and make the same choice. The predictions are

    wait    = what sending takes longer than the backward pass that hides it
    step    = computing + encoding and decoding + wait

with the link rates that were measured when the job started and codec rates measured here. Compression is
chosen only for a predicted gain of at least 5 %, and nothing lossier than int8 with error feedback.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from .. import api
from ..collective.codec_rates import SHARE, Rates, code_s, measured_rates
from ..errors import ConfigError
from ..ops import ReduceOp
from ..process_set import ProcessSet, number_of, size_of
from ..schedule.cost import CostModel
from .compression import Compression, PowerSGD, compressor_of

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.05
STEPS = 6
"""Steps without compression before the choice; the first is not timed."""
COMPRESSORS = {"none": Compression.none, "bf16": Compression.bf16, "int8": Compression.int8}


class Step(NamedTuple):
    """A training step without compression, in seconds.

    Attributes:
        period_s: from the end of one step to the end of the next.
        wait_s: of that, waiting for reductions after the backward pass.
        overlap_s: from the first reduction's start to the end of the backward pass.
    """

    period_s: float
    wait_s: float
    overlap_s: float


class Links(NamedTuple):
    """The network as a gradient sees it.

    Attributes:
        size: number of ranks.
        local_size: ranks per host.
        byte_s: seconds per byte of the slowest interface, each way.
        latency_s: of a message.
    """

    size: int
    local_size: int
    byte_s: float
    latency_s: float


class Choice(NamedTuple):
    """What was chosen, and the predicted seconds per step by name."""

    name: str
    steps_s: Dict[str, float]

    def describe(self) -> str:
        """The choice in one line, like ``int8: step 1.90 s -> 1.10 s predicted``."""
        plain, others = self.steps_s["none"], {k: v for k, v in self.steps_s.items() if k != "none"}
        best = min(others, key=lambda name: others[name])
        if self.name == "none":
            return f"none: step {plain:.3g} s, {best} {others[best]:.3g} s predicted, a gain of less than 5 %"
        return f"{self.name}: step {plain:.3g} s -> {self.steps_s[self.name]:.3g} s predicted"


def links_of(model: Optional[CostModel], size: int) -> Links:
    """The network of a job, from its calibration; a fast one if nothing was measured."""
    if model is None or size < 2:
        return Links(size, 1, 0.25e-9, 20e-6)
    if not model.hosts:
        return Links(size, size, model.byte_s, model.latency_s)
    local = max(model.hosts.count(host) for host in set(model.hosts))
    return Links(size, local, max(model.wire_byte_s), model.wire_latency_s)


def send_s(name: str, nbytes: int, links: Links) -> float:
    """Seconds that the network needs for an all-reduce of gradients of ``nbytes`` in float32."""
    size, local = links.size, links.local_size
    if size < 2:
        return 0.0
    hosts = max(1, size // local)
    if hosts == 1:
        crossing = 2 * (size - 1) / size
    elif name == "int8":
        crossing = 2 * local * (size - local) / size  # every rank exchanges with every other
    else:
        crossing = 2 * (hosts - 1) / hosts  # reduced within hosts first
    return crossing * nbytes * SHARE[name] * links.byte_s + 2 * links.latency_s


def choose(nbytes: int, step: Step, links: Links, rates: Dict[str, Rates]) -> Choice:
    """The compression with the shortest predicted step.

    Args:
        nbytes: of all gradients in float32.
        step: the slowest rank's, measured without compression.
        links: the network.
        rates: of the codecs.
    """
    computing_s = max(0.0, step.period_s - step.wait_s)
    steps_s = {}
    for name in COMPRESSORS:
        wait_s = max(0.0, send_s(name, nbytes, links) - step.overlap_s)
        steps_s[name] = computing_s + code_s(nbytes, links.size, rates.get(name)) + wait_s
    best = min(steps_s, key=lambda name: steps_s[name])
    gains = steps_s[best] <= (1 - LEAST_GAIN) * steps_s["none"]
    return Choice(best if gains else "none", steps_s)


class AutoCompression:
    """Times the first steps of an optimizer, then chooses for all ranks.

    Args:
        process_set: the ranks that take part.

    Attributes:
        chosen: the compressor in use.
    """

    kind = "auto"

    def __init__(self, process_set: ProcessSet) -> None:
        self.chosen: Any = Compression.none
        self._process_set = process_set
        self._steps: List[Step] = []
        self._first_s = 0.0
        self._last_end_s = 0.0
        self._decided = False

    def submitting(self) -> None:
        """A reduction is about to start."""
        if not self._first_s:
            self._first_s = time.perf_counter()

    def finished(self, nbytes: int, waited_from_s: float) -> bool:
        """A step's reductions are complete; decides after some steps.

        Args:
            nbytes: of all gradients in float32.
            waited_from_s: when this rank began to wait, by ``time.perf_counter()``.

        Returns:
            whether :attr:`chosen` has changed.
        """
        if self._decided:
            return False
        now_s = time.perf_counter()
        if self._last_end_s and self._first_s:
            overlap_s = max(0.0, waited_from_s - self._first_s)
            self._steps.append(Step(now_s - self._last_end_s, now_s - waited_from_s, overlap_s))
        self._first_s, self._last_end_s = 0.0, now_s
        if len(self._steps) < STEPS:
            return False
        self._decided = True
        choice = self._agree(nbytes)
        self.chosen = COMPRESSORS[choice.name]
        if api.rank() == 0:
            logger.warning("compression=auto chooses %s", choice.describe())
        return choice.name != "none"

    def restart(self) -> None:
        """Measure and choose again; to be called on all ranks, when links have changed."""
        self._steps, self._first_s, self._last_end_s, self._decided = [], 0.0, 0.0, False

    def _agree(self, nbytes: int) -> Choice:
        """The same choice on all ranks, from the slowest rank's numbers."""
        own = [sorted(item)[len(self._steps) // 2] for item in zip(*self._steps)]
        rates = measured_rates()
        flat = [value for name in sorted(rates) for value in rates[name]]
        # The shortest overlap and the shortest wait count: the rank that waits longest has computed least.
        numbers = np.array([own[0], -own[1], -own[2], *flat], np.float64)
        api.context().engine.allreduce(
            [numbers], ReduceOp.MAX, "ringcomm.auto", process_set=number_of(self._process_set), urgent=True
        ).wait()
        step = Step(float(numbers[0]), -float(numbers[1]), -float(numbers[2]))
        slowest = _rates_from(sorted(rates), numbers[3:].tolist())
        return choose(nbytes, step, links_of(api.context().cost_model, size_of(self._process_set)), slowest)


def configured(compression: Any, process_set: ProcessSet, weighted: bool = False) -> Any:
    """The compressor for what a program has passed: of ``Compression.none``, what the settings say.

    Args:
        compression: a compressor or its name.
        process_set: the ranks that reduce.
        weighted: whether gradients have weights.

    Raises:
        ConfigError: no compressor has the name, or it cannot average with weights.
    """
    if compression is Compression.none and api.is_initialized():
        compression = api.context().settings.compression or compression
    if compression == "auto":
        return AutoCompression(process_set)
    compressor = compressor_of(compression)
    if weighted and isinstance(compressor, PowerSGD):
        raise ConfigError(
            "PowerSGD averages gradients without weights, so it cannot be used with balanced batches. Use "
            "Compression.int8 or Compression.bf16."
        )
    return compressor


def _rates_from(names: Sequence[str], numbers: Sequence[Any]) -> Dict[str, Rates]:
    return {
        name: Rates(float(numbers[2 * place]), float(numbers[2 * place + 1]))
        for place, name in enumerate(names)
    }
