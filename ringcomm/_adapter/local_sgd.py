"""Local steps: every rank trains by itself for a while, then the ranks' models are brought together.

Local SGD (Stich, "Local SGD converges fast and communicates little", 2019): the ranks average their weights
once per ``sync_every`` steps, in place of gradients in every step. An outer optimizer may follow, as in
DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023): the
average of what the ranks have changed is taken for a gradient, with which Nesterov's momentum makes one step
from the weights that all ranks had before.

**Streaming** (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025): the weights are
divided into fragments that take turns, and a fragment's reduction runs during the next local steps. When it
is complete, the outer step replaces the weights that the fragment had when the reduction began; what local
steps have changed since then is kept, and is part of the next delta.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Type, TypeVar, Union

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, global_process_set, number_of
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ConfigError
from ..job.context import Context
from ..ops import CODECS, ReduceOp, codec_number

_MIN_ITEMS = 4096
"""Smaller deltas are sent as bfloat16 where others are quantized."""


_Made = TypeVar("_Made", bound="OuterOptimizer")


class OuterOptimizer:
    """What makes outer steps: the values of its arguments ``outer_lr`` and ``outer_momentum`` by name."""

    @classmethod
    def diloco(cls: Type[_Made], *arguments: Any, **options: Any) -> _Made:
        """Make one with DiLoCo's values: ``outer_lr=0.7`` and ``outer_momentum=0.9``.

        They suit long runs with small learning rates, such as those of language models. In runs of some
        dozens of synchronizations they lose accuracy, or the loss diverges: see docs/compression.md.

        Args:
            arguments: those of the class.
            options: those of the class.
        """
        return cls(*arguments, **{"outer_lr": 0.7, "outer_momentum": 0.9, **options})


class LocalSGD(OuterOptimizer):
    """Local steps on arrays of weights, which are overwritten at every synchronization.

    Example::

        local = rc.LocalSGD(weights, sync_every=16)
        for batch in batches:
            for weight, gradient in zip(weights, gradients_of(weights, batch)):
                weight -= 0.1 * gradient
            local.step()
        local.synchronize()

    This is another algorithm than averaging gradients. The defaults average the weights. At high learning
    rates that loses accuracy (-2.2 points at twice the usual rate with batch normalization, -0.5 at the usual
    one, see docs/compression.md): compare with averaging gradients in every step on your own model first.
    :meth:`diloco` has an outer momentum, for runs with hundreds of synchronizations.

    All ranks must begin with the same weights, and synchronize equally often. With ``sync_every=1`` this is
    data-parallel SGD on the deltas of the ranks.

    Args:
        weights: writable NumPy arrays of float32 or float64, of equal shapes on all ranks.
        sync_every: number of local steps between two synchronizations; or one number per rank (in rank
            order), so that slow ranks do fewer.
        outer_lr: step size of the outer optimizer; 1 without momentum: the weights are averaged.
        outer_momentum: its Nesterov momentum; 0: none.
        compression: the codec for deltas: None, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"int4"``. With the
            last two, arrays of less than two dimensions or 4096 elements are sent as bfloat16, and what is
            lost is added to the next delta.
        averaged: arrays that are averaged at every synchronization instead, such as batch-norm statistics;
            with fragments, together with the last one.
        fragments: into how many parts of similar size the arrays are divided. Each is synchronized every
            ``sync_every`` steps, one after the other at even distances.
        overlap: number of local steps during which a reduction runs before its result is taken, so that it
            need not be waited for; 0: it is waited for at once. Less than ``sync_every``.
        process_set: the ranks that take part; by default all.
        name: of the operations; needed if a program has several.
        context: the job; by default that of ``init()``.

    Raises:
        ConfigError: ``sync_every``, ``outer_lr``, ``outer_momentum``, ``fragments`` or ``overlap`` is out of
            range, or an array is not a writable array of floating-point numbers.
        Misuse: there is no such codec.
    """

    def __init__(
        self,
        weights: Sequence[Array],
        sync_every: Union[int, Sequence[int]] = 16,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        compression: Any = None,
        averaged: Sequence[Array] = (),
        process_set: ProcessSet = global_process_set,
        name: str = "local_sgd",
        context: Optional[Context] = None,
        fragments: int = 1,
        overlap: int = 0,
    ) -> None:
        self._context = context or api.context()
        periods = _periods(sync_every, self._context.size)
        self._every = periods[self._context.rank]
        if not 1 <= fragments <= min(periods) or not 0 <= overlap < min(periods):
            raise ConfigError(
                f"fragments={fragments} is a number from 1 to sync_every, and overlap={overlap} one from 0 "
                f"to sync_every - 1; sync_every is {min(periods)}."
            )
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ConfigError(
                f"outer_lr is positive and outer_momentum from 0 to 1, not {outer_lr} and {outer_momentum}."
            )
        self._weights, self._averaged = list(weights), list(averaged)
        for array in (*self._weights, *self._averaged):
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.flags.writeable:
                raise ConfigError("LocalSGD works on writable NumPy arrays of float32 or float64.")
        self._lr, self._momentum = outer_lr, outer_momentum
        self._codec = CODECS[codec_number(compression)]
        self._process_set, self._name = process_set, name
        self._anchors = [array.copy() for array in self._weights]
        self._velocities = [np.zeros_like(array) for array in self._weights]
        self._residuals = [np.zeros(array.size, np.float32) for array in self._weights]
        self._steps = 0
        self._overlap = overlap
        self._fragments = _divided([array.nbytes for array in self._weights], fragments)
        # The step of a period at which each fragment's reduction begins; the last one's is the period's last.
        self._begins = [self._every * (number + 1) // fragments for number in range(fragments)]
        self._running: Dict[int, _Exchange] = {}

    @property
    def steps(self) -> int:
        """Local steps since all ranks had the same weights."""
        return self._steps

    def due(self) -> bool:
        """Count a local step; whether :meth:`advance` has something to do now."""
        self._steps += 1
        return bool(self._ending() or self._beginning())

    def _beginning(self) -> List[int]:
        """The fragments whose reduction begins after this step."""
        within = (self._steps - 1) % self._every + 1
        return [number for number, step in enumerate(self._begins) if step == within]

    def _ending(self) -> List[int]:
        """The fragments whose result is taken after this step, in the order in which they began."""
        return [number for number, item in self._running.items() if item.until <= self._steps]

    def touched(self) -> List[int]:
        """Which arrays :meth:`advance` reads or overwrites now: places in ``weights``, then ``averaged``.

        For callers whose weights are elsewhere, and are copied to the arrays and back.
        """
        numbers = {*self._ending(), *self._beginning()}
        places = [place for number in sorted(numbers) for place in self._fragments[number]]
        if len(self._fragments) - 1 in numbers:
            places += range(len(self._weights), len(self._weights) + len(self._averaged))
        return places

    def step(self) -> bool:
        """Count a local step, and synchronize if it is time; after every step of the local optimizer.

        Returns:
            whether the ranks have synchronized, at least a fragment.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        if not self.due():
            return False
        self.advance()
        return True

    def advance(self) -> None:
        """Take the results that are due, and begin the reductions that are; after :meth:`due`.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        if len(self._fragments) == 1 and not self._overlap:
            self.synchronize()
            return
        for number in self._ending():
            self._end(number)
        for number in self._beginning():
            self._begin(number)
            if not self._overlap:
                self._end(number)

    def synchronize(self) -> None:
        """Average the deltas of all ranks and make the outer step. All ranks then have the same weights.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        for number in list(self._running):
            self._end(number)
        self._steps = 0
        for number in range(len(self._fragments)):
            self._begin(number)
        for number in list(self._running):
            self._end(number)

    def _begin(self, number: int) -> None:
        """Start the reduction of what this rank has changed in a fragment."""
        places = self._fragments[number]
        started = {place: self._weights[place].copy() for place in places} if self._overlap else {}
        # Into arrays of their own: the plain difference of arrays of zero dimensions is a scalar, whose flat
        # copy would be averaged in place of it.
        deltas = {place: np.empty_like(self._anchors[place]) for place in places}
        for place, delta in deltas.items():
            np.subtract(self._anchors[place], self._weights[place], out=delta)
        groups: Dict[str, List[int]] = {}
        for place in places:
            groups.setdefault(self._codec_of(deltas[place]), []).append(place)
        label = "" if len(self._fragments) == 1 else f"{number}."
        handles = [
            self._average(label, codec, indices, [deltas[place] for place in indices])
            for codec, indices in sorted(groups.items())
        ]
        means: List[Array] = []
        if number == len(self._fragments) - 1 and self._averaged:
            means = [np.array(array, order="C") for array in self._averaged]
            handles.append(self._start(f"{label}averaged", means, "none", ()))
        before = [array.copy() for array in self._averaged] if means else []
        until = self._steps + self._overlap
        self._running[number] = _Exchange(until, handles, started, deltas, before, means)

    def _end(self, number: int) -> None:
        """Wait for a fragment's reduction, and make the outer step."""
        exchange = self._running.pop(number)
        for handle in exchange.handles:
            handle.wait()
        for array, before, mean in zip(self._averaged, exchange.before, exchange.means):
            array[...] = mean + (array - before)
        for place, delta in exchange.deltas.items():
            weight, anchor, velocity = self._weights[place], self._anchors[place], self._velocities[place]
            if self._momentum:
                velocity *= weight.dtype.type(self._momentum)
                velocity += delta
                delta += weight.dtype.type(self._momentum) * velocity
            anchor -= weight.dtype.type(self._lr) * delta
            if exchange.started:
                weight -= exchange.started[place]  # what local steps have changed since then
                weight += anchor
            else:
                weight[...] = anchor

    def _drop_running(self) -> None:
        """Wait for what is running, and forget it."""
        for exchange in self._running.values():
            for handle in exchange.handles:
                handle.wait()
        self._running.clear()

    def _codec_of(self, delta: Array) -> str:
        if self._codec not in ("int8", "int4") or (delta.ndim > 1 and delta.size >= _MIN_ITEMS):
            return self._codec
        return "bf16"

    def _average(self, label: str, codec: str, indices: Sequence[int], deltas: Sequence[Array]) -> Handle:
        lossy = codec in ("int8", "int4")
        residuals = [self._residuals[index] for index in indices] if lossy else []
        return self._start(f"{label}{codec}", deltas, codec, residuals)

    def _start(self, label: str, arrays: Sequence[Array], codec: str, residuals: Sequence[Array]) -> Handle:
        return self._context.engine.allreduce(
            [array.reshape(-1) for array in arrays], ReduceOp.AVERAGE, f"{self._name}.{label}",
            [array.shape for array in arrays], process_set=number_of(self._process_set),
            compression=codec, residuals=residuals,
        )  # fmt: skip

    def state_dict(self) -> Dict[str, Any]:
        """The outer optimizer's state, for a checkpoint of this rank.

        Returns:
            copies of arrays: ``anchors`` (the weights after the last synchronization), ``velocities`` and
            ``residuals``; and the number of local ``steps`` since then.

        Raises:
            ConfigError: with ``overlap``, a reduction is running: call :meth:`synchronize` before.
        """
        if self._running:
            raise ConfigError("A reduction is running: call synchronize() on all ranks before state_dict().")
        return {
            "anchors": [array.copy() for array in self._anchors],
            "velocities": [array.copy() for array in self._velocities],
            "residuals": [array.copy() for array in self._residuals],
            "steps": self._steps,
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue with the state of :meth:`state_dict`. The weights themselves must be loaded, too.

        Args:
            state: what the same rank has saved.
        """
        for mine, kind in (
            (self._anchors, "anchors"), (self._velocities, "velocities"), (self._residuals, "residuals"),
        ):  # fmt: skip
            for array, saved in zip(mine, state[kind]):
                array[...] = saved
        self._drop_running()
        self._steps = int(state["steps"])

    def restart(self) -> None:
        """Take the present weights for those that all ranks have, and forget momentum and residuals."""
        self._drop_running()
        self._steps = 0
        for anchor, weight in zip(self._anchors, self._weights):
            anchor[...] = weight
        for array in (*self._velocities, *self._residuals):
            array[...] = 0


class _Exchange(NamedTuple):
    """The reduction of a fragment that is running.

    Attributes:
        until: the local step after which its result is taken.
        handles: of the engine's operations.
        started: by place, the weights when it began; empty if it is waited for at once.
        deltas: by place, what is being averaged.
        before: the arrays to be averaged, when it began.
        means: what becomes their averages.
    """

    until: int
    handles: List[Handle]
    started: Dict[int, Array]
    deltas: Dict[int, Array]
    before: List[Array]
    means: List[Array]


def _divided(sizes: Sequence[int], parts: int) -> List[List[int]]:
    """Neighbouring places in so many parts of similar total size; parts may be empty.

    >>> _divided([4, 4, 1, 1, 6], 2)
    [[0, 1], [2, 3, 4]]
    """
    found: List[List[int]] = [[] for _ in range(parts)]
    total, reached = max(1, sum(sizes)), 0
    for place, size in enumerate(sizes):
        found[min(parts - 1, (2 * reached + size) * parts // (2 * total))].append(place)
        reached += size
    return found


def _periods(sync_every: Union[int, Sequence[int]], size: int) -> List[int]:
    """The local steps between two synchronizations, by rank."""
    periods = [sync_every] * size if isinstance(sync_every, int) else [int(item) for item in sync_every]
    if len(periods) != size or min(periods) < 1:
        raise ConfigError(f"sync_every={sync_every!r}: a number from 1 on, or {size} of them, one per rank.")
    return periods
