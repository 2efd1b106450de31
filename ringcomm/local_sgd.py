"""Local steps: every rank trains by itself for a while, then the ranks' models are brought together.

Local SGD with an outer optimizer, as in DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication
Training of Language Models", 2023): after some local steps every rank has moved its weights by a delta; the
average of the deltas is taken for a gradient, with which Nesterov's momentum makes one step from the weights
that all ranks had before. One reduction per ``sync_every`` steps instead of one per step.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np

from . import api
from .context import Context
from .dtypes import Array
from .engine.request import Handle
from .errors import ConfigError
from .ops import CODECS, ReduceOp, codec_number
from .process_set import ProcessSet, global_process_set, number_of

_LEAST_ITEMS = 4096
"""Smaller deltas are sent as bfloat16 where others are quantized."""


class LocalSGD:
    """Local steps on arrays of weights, which are overwritten at every synchronization.

    Example::

        local = rc.LocalSGD(weights, sync_every=16)
        for batch in batches:
            for weight, gradient in zip(weights, gradients_of(weights, batch)):
                weight -= 0.1 * gradient
            local.step()
        local.synchronize()

    All ranks must begin with the same weights, and synchronize equally often. With ``sync_every=1``,
    ``outer_lr=1`` and ``outer_momentum=0`` this is data-parallel SGD on the deltas of the ranks.

    Args:
        weights: writable NumPy arrays of float32 or float64, of equal shapes on all ranks.
        sync_every: number of local steps between two synchronizations; or one number per rank (in rank
            order), so that slow ranks do fewer.
        outer_lr: step size of the outer optimizer.
        outer_momentum: its Nesterov momentum; 0: none.
        compression: the codec for deltas: None, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"int4"``. With the
            last two, arrays of less than two dimensions or 4096 elements are sent as bfloat16, and what is
            lost is added to the next delta.
        averaged: arrays that are averaged at every synchronization instead, such as batch-norm statistics.
        process_set: the ranks that take part; by default all.
        name: of the operations; needed if a program has several.
        context: the job; by default that of ``init()``.

    Raises:
        ConfigError: ``sync_every``, ``outer_lr`` or ``outer_momentum`` is out of range, or an array is not a
            writable array of floating-point numbers.
        Misuse: there is no such codec.
    """

    def __init__(
        self,
        weights: Sequence[Array],
        sync_every: Union[int, Sequence[int]] = 16,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        compression: Any = None,
        averaged: Sequence[Array] = (),
        process_set: ProcessSet = global_process_set,
        name: str = "local_sgd",
        context: Optional[Context] = None,
    ) -> None:
        self._context = context or api.context()
        self._every = _own_period(sync_every, self._context.rank, self._context.size)
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

    @property
    def steps(self) -> int:
        """Local steps since the last synchronization."""
        return self._steps

    def due(self) -> bool:
        """Count a local step; whether it is time to synchronize."""
        self._steps += 1
        return self._steps >= self._every

    def step(self) -> bool:
        """Count a local step, and synchronize if it is time; after every step of the local optimizer.

        Returns:
            whether the ranks have synchronized.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        if not self.due():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Average the deltas of all ranks and make the outer step. All ranks then have the same weights.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        self._steps = 0
        deltas = [anchor - weight for anchor, weight in zip(self._anchors, self._weights)]
        groups: Dict[str, List[int]] = {}
        for index, delta in enumerate(deltas):
            groups.setdefault(self._codec_of(delta), []).append(index)
        handles = [self._average(codec, indices, deltas) for codec, indices in sorted(groups.items())]
        means = [np.ascontiguousarray(array) for array in self._averaged]
        if means:
            handles.append(self._start("averaged", means, "none", ()))
        for handle in handles:
            handle.wait()
        for array, mean in zip(self._averaged, means):
            array[...] = mean
        for weight, anchor, velocity, delta in zip(self._weights, self._anchors, self._velocities, deltas):
            if self._momentum:
                velocity *= weight.dtype.type(self._momentum)
                velocity += delta
                delta += weight.dtype.type(self._momentum) * velocity
            anchor -= weight.dtype.type(self._lr) * delta
            weight[...] = anchor

    def _codec_of(self, delta: Array) -> str:
        if self._codec not in ("int8", "int4") or (delta.ndim > 1 and delta.size >= _LEAST_ITEMS):
            return self._codec
        return "bf16"

    def _average(self, codec: str, indices: Sequence[int], deltas: Sequence[Array]) -> Handle:
        lossy = codec in ("int8", "int4")
        residuals = [self._residuals[index] for index in indices] if lossy else []
        return self._start(codec, [deltas[index] for index in indices], codec, residuals)

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
        """
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
        self._steps = int(state["steps"])

    def restart(self) -> None:
        """Take the present weights for those that all ranks have, and forget momentum and residuals."""
        self._steps = 0
        for anchor, weight in zip(self._anchors, self._weights):
            anchor[...] = weight
        for array in (*self._velocities, *self._residuals):
            array[...] = 0


def _own_period(sync_every: Union[int, Sequence[int]], rank: int, size: int) -> int:
    periods = [sync_every] * size if isinstance(sync_every, int) else [int(item) for item in sync_every]
    if len(periods) != size or min(periods) < 1:
        raise ConfigError(f"sync_every={sync_every!r}: a number from 1 on, or {size} of them, one per rank.")
    return periods[rank]
