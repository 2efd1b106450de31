"""Starts collectives on tensors: passes their elements to the engine as flat arrays."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .. import api
from .._adapter.arguments import scattered_reduction, wire_name
from ..engine.request import Handle
from ..ops import ReduceOp
from ..process_set import ProcessSet, number_of
from .tensors import flat_array, host_copy, on_host, plain, shapes_of, tensor_of


def start_allreduce(
    targets: Sequence[torch.Tensor],
    op: ReduceOp,
    name: Optional[str],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    finish: Callable[[], Any],
    urgent: bool,
    weight: Optional[float] = None,
) -> Handle:
    """Start a reduction in place of tensors in host memory; ``finish()`` makes the handle's result."""
    return api.context().engine.allreduce(
        [flat_array(target) for target in targets], op, wire_name("allreduce", name), shapes_of(targets),
        prescale, postscale, number_of(process_set), urgent, lambda _: finish(), weight=weight,
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
    hosts = [host_copy(plain(tensor, "reducescatter")) for tensor in tensors]
    return api.context().engine.reducescatter(
        [flat_array(host) for host in hosts], shapes_of(hosts), scattered_reduction(op),
        wire_name("reducescatter", name), prescale, postscale, number_of(process_set), urgent,
        _list_or_one(tensors, grouped),
    )  # fmt: skip


def start_allgather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    grouped: bool,
) -> Handle:
    """Start gathering the rows of all ranks; a list as result if ``grouped``."""
    own = on_host if urgent else host_copy
    hosts = [own(plain(tensor, "allgather")) for tensor in tensors]
    return api.context().engine.allgather(
        [flat_array(host) for host in hosts], shapes_of(hosts), wire_name("allgather", name),
        number_of(process_set), urgent, _list_or_one(tensors, grouped),
    )  # fmt: skip


def _list_or_one(tensors: Sequence[torch.Tensor], grouped: bool) -> Callable[[Any], Any]:
    """A converter of the engine's arrays to tensors on the devices of ``tensors``."""
    likes = list(tensors)

    def convert(arrays: Sequence[Any]) -> Any:
        results = [tensor_of(array, like) for array, like in zip(arrays, likes)]
        return results if grouped else results[0]

    return convert


def start_broadcast(
    host: torch.Tensor,
    root_rank: int,
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    finish: Callable[[], Any],
) -> Handle:
    """Start overwriting a tensor in host memory; ``finish()`` makes the handle's result."""
    return api.context().engine.broadcast(
        [flat_array(host)], root_rank, wire_name("broadcast", name), shapes_of([host]),
        number_of(process_set), urgent, lambda _: finish(),
    )  # fmt: skip
