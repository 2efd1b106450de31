"""The asynchronous collectives: they return at once, and ``synchronize(handle)`` gives the result.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once (not if ``urgent``: then the caller waits). Those with one work in the caller's own tensor.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Union

import torch

from .. import api
from .._adapter.arguments import reduction, row_counts, scattered_reduction, wire_name
from ..collective.call_sites import look_through
from ..engine.request import Handle
from ..errors import ConfigError
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set, number_of
from .tensors import InPlace, back_to, flat_array, host_copy, on_host, plain, shapes_of, tensor_of

look_through(torch)

AnyHandle = Union[Handle, Callable[[], Any]]


def _reduce(
    targets: Sequence[torch.Tensor],
    op: ReduceOp,
    name: Optional[str],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    finish: Callable[[], Any],
    urgent: bool,
) -> Handle:
    return api.context().engine.allreduce(
        [flat_array(target) for target in targets], op, wire_name("allreduce", name), shapes_of(targets),
        prescale, postscale, number_of(process_set), urgent, lambda _: finish(),
    )  # fmt: skip


def allreduce_async(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Start reducing a tensor of the same shape and type from every rank; the result is a new tensor.

    Ranks may start their operations in any order: those of the same ``name`` belong together, and
    those without a name by their order.

    Args:
        average: deprecated; use ``op``.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies every contribution before, ``postscale_factor`` the result after.
        urgent: do not wait for company.
    """
    chosen = reduction(op, average)
    host = host_copy(plain(tensor, "allreduce"))
    return _reduce(
        [host], chosen, name, prescale_factor, postscale_factor, process_set,
        lambda: back_to(tensor.device, host), urgent,
    )  # fmt: skip


def allreduce_async_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Like :func:`allreduce_async`, overwriting the tensor, which must be left alone until then."""
    chosen = reduction(op, average)
    target = InPlace(tensor, "allreduce_")
    return _reduce(
        [target.host], chosen, name, prescale_factor, postscale_factor, process_set, target.finish, urgent
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Start reducing several tensors, all of them or none; the result is a list of new tensors."""
    chosen = reduction(op, average)
    listed = list(tensors)
    hosts = [host_copy(plain(tensor, "allreduce")) for tensor in listed]

    def finish() -> List[torch.Tensor]:
        return [back_to(tensor.device, host) for tensor, host in zip(listed, hosts)]

    return _reduce(
        hosts, chosen, name, prescale_factor, postscale_factor, process_set, finish, urgent
    )  # fmt: skip


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Like :func:`grouped_allreduce_async`, overwriting the tensors."""
    chosen = reduction(op, average)
    targets = [InPlace(tensor, "grouped_allreduce_") for tensor in tensors]
    return _reduce(
        [target.host for target in targets], chosen, name, prescale_factor, postscale_factor, process_set,
        lambda: [target.finish() for target in targets], urgent,
    )  # fmt: skip


def reducescatter_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    urgent: bool = False,
) -> Handle:
    """Start a reduction of which every rank gets its rows only: the first ranks one more if uneven."""
    return _scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, urgent, False)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    urgent: bool = False,
) -> Handle:
    """Like :func:`reducescatter_async` for several tensors; the result is a list."""
    return _scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, urgent, True)


def _scatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    urgent: bool,
    grouped: bool,
) -> Handle:
    hosts = [host_copy(plain(tensor, "reducescatter")) for tensor in tensors]
    return api.context().engine.reducescatter(
        [flat_array(host) for host in hosts], shapes_of(hosts), scattered_reduction(op),
        wire_name("reducescatter", name), prescale, postscale, number_of(process_set), urgent,
        _list_or_one(tensors, grouped),
    )  # fmt: skip


def allgather_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Start collecting every rank's rows, in rank order; how many there are may differ from rank to rank."""
    return _gather([tensor], name, process_set, urgent, False)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Like :func:`allgather_async` for several tensors; the result is a list."""
    return _gather(tensors, name, process_set, urgent, True)


def _gather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    grouped: bool,
) -> Handle:
    own = on_host if urgent else host_copy
    hosts = [own(plain(tensor, "allgather")) for tensor in tensors]
    return api.context().engine.allgather(
        [flat_array(host) for host in hosts], shapes_of(hosts), wire_name("allgather", name),
        number_of(process_set), urgent, _list_or_one(tensors, grouped),
    )  # fmt: skip


def _list_or_one(tensors: Sequence[torch.Tensor], grouped: bool) -> Callable[[Any], Any]:
    """What makes tensors of the engine's arrays, where the callers' own ones are."""
    likes = list(tensors)

    def convert(arrays: Sequence[Any]) -> Any:
        results = [tensor_of(array, like) for array, like in zip(arrays, likes)]
        return results if grouped else results[0]

    return convert


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Start copying the root's tensor to every rank; all pass one of the same shape and type.

    Args:
        root_rank: a rank of the job, also if only a process set takes part.
    """
    host = host_copy(plain(tensor, "broadcast"))
    return _broadcast(host, root_rank, name, process_set, urgent, lambda: back_to(tensor.device, host))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Like :func:`broadcast_async`, overwriting the tensor, which must be left alone until then."""
    target = InPlace(tensor, "broadcast_")
    return _broadcast(target.host, root_rank, name, process_set, urgent, target.finish)


def _broadcast(
    host: torch.Tensor,
    root_rank: int,
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    finish: Callable[[], Any],
) -> Handle:
    return api.context().engine.broadcast(
        [flat_array(host)], root_rank, wire_name("broadcast", name), shapes_of([host]),
        number_of(process_set), urgent, lambda _: finish(),
    )  # fmt: skip


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
    """Start sending rows to every rank and receiving rows from every rank.

    Args:
        splits: how many rows go to each rank; without it they are dealt out evenly.

    Returns:
        a handle for a pair: the received rows in rank order, and how many came from each rank (int32).
    """
    host = (on_host if urgent else host_copy)(plain(tensor, "alltoall"))
    engine = api.context().engine
    number = number_of(process_set)
    members = len(engine.sets.check_member(number))
    shape = tuple(host.shape)
    counts = row_counts(shape[0], _listed(splits), members) if shape else [0] * members

    def convert(result: Any) -> Any:
        rows, received = result
        counted = torch.from_numpy(received)
        return tensor_of(rows, tensor), counted.to(splits.device) if _is_tensor(splits) else counted

    return engine.alltoall(
        flat_array(host), shape, counts, wire_name("alltoall", name), number, urgent, convert
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _listed(splits: Any) -> Optional[List[int]]:
    if splits is None:
        return None
    numbers = splits if _is_tensor(splits) else torch.as_tensor(splits)
    if numbers.dim() != 1 or numbers.dtype not in (torch.int32, torch.int64, torch.int16, torch.uint8):
        raise ConfigError(
            f"alltoall expects splits to contain 32-bit integer elements in one dimension, not {splits!r}."
        )
    listed: List[int] = numbers.tolist()
    return listed


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start reducing sparse (COO) tensors of the same shape: everybody's entries side by side.

    Returns:
        a handle that is called for the result: a sparse tensor in which entries may repeat.

    Raises:
        ConfigError: op is neither Average nor Sum.
    """
    chosen = op_of(op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ConfigError(f"sparse_allreduce_async has Average and Sum, not {chosen.name.capitalize()}.")
    # The entries become the rows: allgather puts rows below each other.
    indices, values = tensor._indices().t().contiguous(), tensor._values()
    label = name or ""
    places = allgather_async(indices, label and f"{label}.indices", process_set)
    numbers = allgather_async(values, label and f"{label}.values", process_set)

    def finish() -> torch.Tensor:
        found, amounts = synchronize(places), synchronize(numbers)
        if chosen == ReduceOp.AVERAGE:
            amounts = amounts / process_set.size()
        return torch.sparse_coo_tensor(found.t(), amounts, tensor.shape, check_invariants=False)

    return finish


def poll(handle: AnyHandle) -> bool:
    """Whether an operation is done, so that :func:`synchronize` would not wait."""
    return handle.done() if isinstance(handle, Handle) else False


def synchronize(handle: Any) -> Any:
    """Wait for an operation and take its result, or raise its error. None for what is no handle."""
    if isinstance(handle, Handle):
        return handle.wait()
    return handle() if callable(handle) else None
