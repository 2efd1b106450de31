"""How accuracy.py averages gradients: by ringcomm's codecs and PowerSGD, by local steps, or harmfully."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import numpy as np

from ringcomm._adapter.compression import PowerSGD, codec_for, compressor_of
from ringcomm._adapter.feedback import Residuals
from ringcomm._adapter.intervals import Facts, Interval
from ringcomm._adapter.powersgd import Matrix, PowerIteration
from ringcomm.codec.base import BLOCK_ITEMS, SEGMENT_ITEMS
from ringcomm.codec.table import make_codec
from ringcomm.schedule.select import Selector

WORKERS = 4
SLOW = 12.0
"""How many local steps an exchange takes: 2.8 s with ResNet-50 and int8 at 100 Mbit/s, and 0.24 s for a step.

So no interval need be longer than 120 steps; at 20 Mbit/s, 600.
"""

Array = np.ndarray
Gradients = List[List[Array]]
"""By worker and parameter."""


class Exact:
    """The average in float32, in the order of the workers."""

    interval: Optional[Interval] = None
    outer: Optional[float] = None
    rate = 1.0

    def average(self, gradients: Gradients) -> List[Array]:
        """The average of each parameter's gradients."""
        return [np.mean(parts, axis=0, dtype=np.float32) for parts in zip(*gradients)]


class Coded(Exact):
    """ringcomm's codecs: matrices with the codec, the rest as bfloat16, with the executor's arithmetic."""

    def __init__(self, compression: Any) -> None:
        self._compressor = compressor_of(compression)
        self._residuals: Dict[str, List[Array]] = {}

    def average(self, gradients: Gradients) -> List[Array]:
        """The average of each parameter's gradients."""
        found: List[Array] = list(gradients[0])
        groups: Dict[str, List[int]] = {}
        for index, part in enumerate(gradients[0]):
            kind = self._compressor.kind
            codec = kind if kind in ("bf16", "fp16") else codec_for(self._compressor, "float32", part.shape)
            groups.setdefault(codec, []).append(index)
        for codec, indices in groups.items():
            starts = [0]
            for index in indices:
                starts.append(starts[-1] + -(-found[index].size // BLOCK_ITEMS) * BLOCK_ITEMS)
            data = np.zeros((len(gradients), starts[-1]), np.float32)
            for worker, mine in enumerate(gradients):
                for index, start in zip(indices, starts):
                    data[worker, start : start + mine[index].size] = mine[index].reshape(-1)
            kept = None
            if codec in ("int8", "int4"):
                zeros = [np.zeros(starts[-1], np.float32) for _ in gradients]
                kept = self._residuals.setdefault(codec, zeros)
            mean = coded_average(codec, list(data), kept)
            for index, start in zip(indices, starts):
                found[index] = mean[start : start + found[index].size].reshape(found[index].shape)
        return found


def coded_average(name: str, data: Sequence[Array], residuals: Optional[Sequence[Array]] = None) -> Array:
    """Return what an all-reduce with a codec gives, by the same arithmetic in one process.

    A test compares the bits.

    Args:
        name: of the codec.
        data: each worker's float32, which is overwritten.
        residuals: each worker's, for error feedback.
    """
    codec, workers = make_codec(name), len(data)
    result = np.empty_like(data[0])
    bounds = Selector(0, workers).coded_bounds(result.size, BLOCK_ITEMS)
    with np.errstate(all="ignore"):
        for owner, (first, last) in enumerate(zip(bounds, bounds[1:])):
            for start in range(first, last, SEGMENT_ITEMS):
                place = slice(start, min(last, start + SEGMENT_ITEMS))
                codes = np.empty(codec.encoded_bytes(place.stop - start), np.uint8)
                decoded = np.empty(place.stop - start, np.float32)
                total: Any = None
                for worker, own in enumerate(data):
                    mine = own[place] if residuals is None else own[place] + residuals[worker][place]
                    if worker != owner:
                        codec.encode(mine, codes, decoded)
                        if residuals is not None:
                            residuals[worker][place] = mine - decoded
                        mine = decoded
                    total = mine.copy() if total is None else total + mine
                total /= np.float32(workers)
                codec.encode(total, codes, decoded)
                if residuals is not None:
                    residuals[owner][place] = (total - decoded) * np.float32(workers)
                result[place] = decoded
    return result


class Power(Exact):
    """ringcomm's PowerSGD."""

    def __init__(self, rank: int) -> None:
        self._options = PowerSGD(rank)
        self._residuals = [Residuals() for _ in range(WORKERS)]
        self._iterations: Dict[int, List[PowerIteration]] = {}
        self._rest = Coded("bf16")

    def average(self, gradients: Gradients) -> List[Array]:
        """The average of each parameter's gradients."""
        found = self._rest.average(gradients)
        for index, parts in enumerate(zip(*gradients)):
            if self._options.suits(parts[0].shape):
                found[index] = self._one(index, parts)
        return found

    def _one(self, index: int, parts: Sequence[Array]) -> Array:
        shape = parts[0].shape
        matrix = Matrix(str(index), shape[0], parts[0].size // shape[0])
        if index not in self._iterations:
            self._iterations[index] = [
                PowerIteration([matrix], self._options.rank, item) for item in self._residuals
            ]
        iterations = self._iterations[index]
        data = [[np.array(part, np.float32).reshape(-1)] for part in parts]
        for side in ("left", "right"):
            for iteration, mine in zip(iterations, data):
                if side == "left":
                    iteration.add_residuals(mine)
                    iteration.make_left(mine)
                else:
                    iteration.make_right(mine)
            mean = np.mean([getattr(item, side) for item in iterations], axis=0, dtype=np.float32)
            for iteration in iterations:
                getattr(iteration, side)[:] = mean
        for iteration, mine in zip(iterations, data):
            iteration.finish(mine)
        return data[0][0].reshape(shape)


class Signs(Exact):
    """A control: one bit per element and the mean magnitude of all, without error feedback."""

    def average(self, gradients: Gradients) -> List[Array]:
        """The average of the workers' signs."""
        count = sum(part.size for part in gradients[0])
        scales = [sum(float(np.abs(part).sum()) for part in mine) / count for mine in gradients]
        return [
            np.mean([np.sign(part) * scale for part, scale in zip(parts, scales)], axis=0, dtype=np.float32)
            for parts in zip(*gradients)
        ]


class Local(Exact):
    """Local steps, and an outer Nesterov step on the average of what they changed.

    Args:
        steps: the interval, or "auto".
        outer: the outer momentum.
        rate: factor of the learning rate.
        made: makes what averages deltas, and gradients while the interval is one step.
        max_drift: as of :class:`ringcomm.LocalSGD`.
        cost: how many local steps an exchange takes.
        gradients: whether gradients are averaged while the interval is one step, as for PyTorch.
    """

    def __init__(
        self,
        steps: Union[int, str],
        outer: Optional[float] = None,
        rate: float = 1.0,
        made: Callable[[], Exact] = Exact,
        max_drift: Optional[float] = None,
        cost: float = SLOW,
        gradients: bool = True,
    ) -> None:
        self.interval = Interval(steps, 0, WORKERS, 1, max_drift)
        self._given = max_drift
        self.outer = outer
        self.rate = rate
        self.deltas, self.gradients = made(), made()
        self._cost, self._shares = cost, gradients

    def suit(self, drift: float) -> None:
        """Permit the distance that suits an optimizer, if none was given and intervals are automatic."""
        assert self.interval is not None
        if self.interval.automatic and self._given is None and self._shares:
            self.interval.max_drift = drift

    def averages_state(self) -> bool:
        """Return whether optimizers' states are averaged with the weights."""
        assert self.interval is not None
        return self._shares and self.interval.averages_state()

    def shares(self) -> bool:
        """Return whether the workers average the gradients of the next step."""
        assert self.interval is not None
        return self._shares and self.interval.shares_gradients()

    def follow(self, made: int, apart: float = 0.0, norm: float = 0.0) -> None:
        """After an exchange: the next interval.

        Args:
            made: local steps before it; 0: it was one of gradients.
            apart: square of the workers' mean distance.
            norm: that of the common weights.
        """
        assert self.interval is not None
        sent = Facts(*self.interval.send(0.0, max(1, made), weights=made > 0))
        self.interval.learn(sent._replace(exchange_s=self._cost, step_s=1.0))
        if made:
            self.interval.measured(apart, norm)
        self.interval.begin()


METHODS: Dict[str, Callable[[], Exact]] = {
    "float32": Exact,
    "bf16": lambda: Coded("bf16"),
    "int8": lambda: Coded("int8"),
    "int4": lambda: Coded("int4"),
    "PowerSGD 4": lambda: Power(4),
    "LocalSGD": lambda: Local("auto"),
    "LocalSGD, int8": lambda: Local("auto", made=lambda: Coded("int8")),
    "weights only": lambda: Local("auto", cost=1.6, gradients=False),
    "weights only, int8": lambda: Local("auto", cost=1.6, made=lambda: Coded("int8"), gradients=False),
    "LocalSGD 16": lambda: Local(16),
    "LocalSGD 16, any distance": lambda: Local(16, max_drift=math.inf),
    "LocalSGD.diloco": lambda: Local(16, 0.9),
    "LocalSGD 8, outer momentum 0.6": lambda: Local(8, 0.6, 0.6, max_drift=math.inf),
    "LocalSGD 8, outer momentum 0.6, int8": lambda: Local(8, 0.6, 0.6, lambda: Coded("int8"), math.inf),
    "LocalSGD 8, outer momentum 0.9": lambda: Local(8, 0.9, 0.2, max_drift=math.inf),
    "control: signs, no feedback": Signs,
    "control: 64 local steps, high rate": lambda: Local(64, None, 6.0, max_drift=math.inf),
}
