"""The collectives on NDArrays, and NDArrays as the flat NumPy arrays of the engine.

A call returns when its result is there. On the CPU, NDArrays and NumPy arrays share memory; NDArrays on GPUs
are copied through host memory. MXNet computes in separate threads: an NDArray is read only after pending
writes to it, and overwritten only after pending reads of it.
"""

from __future__ import annotations

import ctypes
from typing import Any, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from .._adapter import submit
from .._adapter.compression import register_cast
from .._adapter.reduction import Reduction
from ..arrays.operands import Operand
from ..calls.async_calls import Operands
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..dtypes import Array
from ..errors import ConfigError, ShapeError, UnsupportedDtypeError

__all__ = [
    "allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter", "reducescatter",
]  # fmt: skip

look_through(mx)

HOST_MEMORY = ("cpu", "cpu_pinned", "cpu_shared")  # device types with shared memory

_ALLREDUCE = "average name priority prescale_factor postscale_factor process_set op weight"
_SCATTER = "op name priority process_set prescale_factor postscale_factor"


@takes("allreduce", _ALLREDUCE, "mx")
def allreduce(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = hvd.allreduce(loss.mean(), name="loss")``.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new NDArray of the same shape, dtype and context, bit-identical on all ranks.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([copy_of(dense(tensor, "allreduce"))], options)[0]


@takes("allreduce", _ALLREDUCE, "mx")
def allreduce_(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray over all ranks in place, on the CPU without any copy.

    Args:
        {tensor_inplace}
        {options}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([NDArrayOperand(dense(tensor, "allreduce_"))], options)[0]


@takes("allreduce", _ALLREDUCE, "mx")
def grouped_allreduce(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays over all ranks in one operation: either all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new NDArrays, in order.

    Raises:
        ConfigError: one of ``tensors`` is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([copy_of(dense(tensor, "allreduce")) for tensor in tensors], options)


@takes("allreduce", _ALLREDUCE, "mx")
def grouped_allreduce_(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays in place, in one operation: either all are reduced, or none.

    Args:
        {tensors_inplace}
        {options}

    Returns:
        a list of the NDArrays themselves.

    Raises:
        ConfigError: one of ``tensors`` is not a dense NDArray, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([NDArrayOperand(dense(tensor, "allreduce_")) for tensor in tensors], options)


def _reduce(operands: Operands, options: Options) -> List[mx.nd.NDArray]:
    if not operands:
        return []
    return submit.start_allreduce(operands, options, True, True).wait()


@takes("reducescatter", _SCATTER, "mx")
def reducescatter(tensor: mx.nd.NDArray, options: Options) -> mx.nd.NDArray:
    """Reduce an NDArray over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new NDArray with this rank's rows. Every member of the set gets ``n // size`` of ``n`` rows; the
        first ``n % size`` members get one more.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray.
        NotOfferedError: op is Adasum.
        ShapeError: the NDArray has no first dimension.
        {call_errors}
    """
    return _scatter([tensor], options)[0]


@takes("reducescatter", _SCATTER, "mx")
def grouped_reducescatter(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    """Reduce several NDArrays in one operation; every rank gets only its rows of each result.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new NDArrays with this rank's rows.

    Raises:
        ConfigError: one of ``tensors`` is not a dense NDArray.
        NotOfferedError: op is Adasum.
        ShapeError: an NDArray has no first dimension.
        {call_errors}
    """
    return _scatter(tensors, options)


def _scatter(tensors: Sequence[mx.nd.NDArray], options: Options) -> List[mx.nd.NDArray]:
    how = Reduction.of_rows(options)
    if not tensors:
        return []
    operands = [copy_of(dense(tensor, "reducescatter")) for tensor in tensors]
    called = how.call(options.name, options.weight, how.compression)
    return submit.start_reducescatter(operands, called, True, True).wait()


@documented
def allgather(
    tensor: mx.nd.NDArray, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
    """Concatenate every rank's NDArray along the first dimension, in rank order.

    Args:
        {tensor_rows}
        {mx_matching}

    Returns:
        a new NDArray with the rows of all ranks. The number of rows may differ between ranks.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray.
        ShapeError: the NDArray has no first dimension.
        {call_errors}
    """
    (result,) = grouped_allgather([tensor], name, priority, process_set)
    return result


@documented
def grouped_allgather(
    tensors: Sequence[mx.nd.NDArray], name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> List[mx.nd.NDArray]:  # fmt: skip
    """Concatenate several NDArrays of every rank along the first dimension, in one operation.

    Args:
        {tensors_rows}
        {mx_matching}

    Returns:
        a list of new NDArrays, one for each of ``tensors``, with the rows of all ranks in rank order. If all
        ranks pass an empty list, none waits for another.

    Raises:
        ConfigError: one of ``tensors`` is not a dense NDArray.
        ShapeError: an NDArray has no first dimension.
        {call_errors}
    """
    if not tensors:
        return []
    operands = [NDArrayOperand(dense(tensor, "allgather"), rows=True) for tensor in tensors]
    return submit.start_allgather(operands, name, process_set, True, True).wait()


@documented
def broadcast(
    tensor: mx.nd.NDArray, root_rank: int, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
    """Copy the root's NDArray to every rank, as a new NDArray.

    Args:
        {tensor_in}
        {root_rank}
        {mx_matching}

    Returns:
        a new NDArray with the root's elements, in the context of ``tensor``.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    operand = copy_of(dense(tensor, "broadcast"))
    return submit.start_broadcast([operand], root_rank, name, process_set, True).wait()


@documented
def broadcast_(
    tensor: mx.nd.NDArray, root_rank: int, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> mx.nd.NDArray:  # fmt: skip
    """Overwrite an NDArray on every rank with the root's NDArray, on the CPU without any copy.

    Args:
        {tensor_inplace}
        {root_rank}
        {mx_matching}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray, or ``root_rank`` is not in the process set.
        {call_errors}
    """
    operand = NDArrayOperand(dense(tensor, "broadcast_"))
    return submit.start_broadcast([operand], root_rank, name, process_set, True).wait()


@documented
def alltoall(
    tensor: mx.nd.NDArray, splits: Any = None, name: Optional[str] = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows to every rank, and receive rows from every rank.

    Args:
        {tensor_rows}
        splits: an NDArray, an array or a list of integers: the number of rows for each rank, in rank order.
            Without it every rank gets equally many rows, and the number of rows must be a multiple of the
            number of ranks.
        {mx_matching}

    Returns:
        the received rows in rank order. With ``splits``, a pair: the received rows, and an NDArray with the
        number of rows from each rank (int32).

    Raises:
        ConfigError: ``tensor`` is not a dense NDArray.
        ShapeError: the splits are not integers or do not fit the NDArray, or it has no first dimension.
        {call_errors}
    """
    operand = NDArrayOperand(dense(tensor, "alltoall"), rows=True)
    counts = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    try:
        handle = submit.start_alltoall(
            operand, counts, name, process_set, True,
            lambda numbers: operand.deliver(np.asarray(numbers, np.int32)),
        )  # fmt: skip
    except ConfigError as problem:
        # Horovod's adapter for MXNet raises a RuntimeError, which a ShapeError is too.
        raise ShapeError(str(problem)) from None
    rows, received = handle.wait()
    return rows if splits is None else (rows, received)


# ---- NDArrays ----------------------------------------------------------------------------------


class _Memory:
    """The memory of an NDArray, for NumPy, whose array holds this, and this holds the NDArray."""

    def __init__(self, array: mx.nd.NDArray, address: int, items: int, dtype: np.dtype[Any]) -> None:
        self.owner = array
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": (items,), "typestr": dtype.str,
        }  # fmt: skip


def dense(tensor: Any, what: str) -> mx.nd.NDArray:
    """Return the NDArray; ConfigError, which names ``what``, if it is not a dense NDArray."""
    if not isinstance(tensor, mx.nd.NDArray):
        raise ConfigError(f"{what} works on NDArrays, not on {type(tensor).__name__}; use mx.nd.array().")
    if tensor.stype != "default":
        raise ConfigError(
            f"{what} works on dense NDArrays, not on {tensor.stype} ones: use tensor.tostype('default'), "
            "and for gradients a layer with sparse_grad=False."
        )
    return tensor


def flat_array(array: mx.nd.NDArray) -> Array:
    """Return the elements of an NDArray when they are computed; on the CPU in the NDArray's memory."""
    array.wait_to_read()
    if array.context.device_type not in HOST_MEMORY:
        return array.asnumpy().reshape(-1)
    dtype = np.dtype(array.dtype)
    items = array.size
    if not items:
        return np.empty(0, dtype)
    address = ctypes.c_void_p()
    # This also converts the layouts of oneDNN to the usual one, in place.
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    assert address.value is not None
    return np.asarray(_Memory(array, address.value, items, dtype))


class NDArrayOperand(Operand):
    """A dense NDArray on any device as the argument of a collective, whose result overwrites it."""

    __slots__ = ("_array", "_staged", "flat")

    def __init__(self, array: mx.nd.NDArray, rows: bool = False) -> None:
        self._array = array
        self.flat = flat_array(array)
        self._staged = array.context.device_type not in HOST_MEMORY
        if not (self._staged or rows):
            check_call(_LIB.MXNDArrayWaitToWrite(array.handle))

    @property
    def shape(self) -> Tuple[int, ...]:  # type: ignore[override]
        """Return the NDArray's shape."""
        return tuple(self._array.shape)

    def finish(self, shape: Optional[Tuple[int, ...]] = None) -> mx.nd.NDArray:
        if self._staged:
            self._array[:] = self.flat.reshape(self.shape)
        return self._array if shape is None else self._array.reshape(shape)

    def deliver(self, rows: Array) -> mx.nd.NDArray:
        return _filled(rows.reshape(-1), rows.shape, self._array).finish()


def copy_of(array: mx.nd.NDArray) -> NDArrayOperand:
    """Return a new NDArray with the elements of another one, on the same device."""
    return _filled(flat_array(array), array.shape, array)


def _filled(flat: Array, shape: Sequence[int], like: mx.nd.NDArray) -> NDArrayOperand:
    module = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    target = NDArrayOperand(module.empty(tuple(shape), dtype=flat.dtype, ctx=like.context))
    target.flat[:] = flat
    return target


def _cast(array: mx.nd.NDArray, dtype: Any) -> mx.nd.NDArray:
    if dtype == "bfloat16":
        raise UnsupportedDtypeError(
            "MXNet's NDArrays cannot be converted to bfloat16. Pass Compression.bf16 to DistributedTrainer: "
            "it converts gradients while they are sent."
        )
    return array.astype(dtype)


register_cast(mx.nd.NDArray, _cast)
