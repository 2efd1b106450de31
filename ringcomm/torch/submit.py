"""Starts collectives on tensors: passes their elements to the engine as flat arrays."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .. import api
from .._adapter.arguments import scattered_reduction, wire_name
from ..arrays.operands import mirrors
from ..calls.process_set import ProcessSet, number_of
from ..engine.request import Handle
from ..ops import ReduceOp
from .tensors import Moved


def start_allreduce(
    arguments: Sequence[Any],
    op: ReduceOp,
    name: Optional[str],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    finish: Callable[[], Any],
    urgent: bool,
    weight: Optional[float] = None,
    absent: int = 0,
    compression: Any = None,
) -> Handle:
    """Start a reduction of arguments (:class:`.tensors.InPlace`, :class:`.tensors.Copied`).

    ``finish()`` makes the handle's result; ``absent`` is as for ``Engine.allreduce``.
    """
    return api.context().engine.allreduce(
        [item.flat for item in arguments], op, wire_name("allreduce", name),
        [item.shape for item in arguments], prescale, postscale, number_of(process_set), urgent,
        lambda _: finish(), compression=compression, weight=weight, absent=absent, mirrors=mirrors(arguments),
    )  # fmt: skip


def start_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    urgent: bool,
    grouped: bool,
) -> Handle:
    """Start a reduction of which every rank gets its rows; a list as result if ``grouped``."""
    moved = [Moved(tensor, "reducescatter") for tensor in tensors]
    return api.context().engine.reducescatter(
        [item.flat for item in moved], [item.shape for item in moved], scattered_reduction(op),
        wire_name("reducescatter", name), prescale, postscale, number_of(process_set), urgent,
        _list_or_one(moved, grouped), mirrors=mirrors(moved),
    )  # fmt: skip


def start_allgather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    grouped: bool,
) -> Handle:
    """Start gathering the rows of all ranks; a list as result if ``grouped``."""
    moved = [Moved(tensor, "allgather", urgent) for tensor in tensors]
    return api.context().engine.allgather(
        [item.flat for item in moved], [item.shape for item in moved], wire_name("allgather", name),
        number_of(process_set), urgent, _list_or_one(moved, grouped), mirrors=mirrors(moved),
    )  # fmt: skip


def _list_or_one(moved: Sequence[Moved], grouped: bool) -> Callable[[Any], Any]:
    """A converter of the engine's arrays to tensors on the devices of the arguments."""

    def convert(arrays: Sequence[Any]) -> Any:
        results = [item.deliver(array) for array, item in zip(arrays, moved)]
        return results if grouped else results[0]

    return convert


def start_broadcast(
    argument: Any,
    root_rank: int,
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
) -> Handle:
    """Start overwriting an argument (:class:`.tensors.InPlace`, :class:`.tensors.Copied`)."""
    return api.context().engine.broadcast(
        [argument.flat], root_rank, wire_name("broadcast", name), [argument.shape],
        number_of(process_set), urgent, lambda _: argument.finish(), mirrors=mirrors([argument]),
    )  # fmt: skip
