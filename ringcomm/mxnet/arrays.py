"""Convert NDArrays to the flat NumPy arrays of the engine, and back.

On the CPU both share memory. NDArrays on GPUs are copied through host memory.

MXNet computes in separate threads: an NDArray is read only after pending writes to it, and overwritten only
after pending reads of it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from .._adapter.compression import register_cast
from ..arrays.operands import Operand
from ..dtypes import Array
from ..errors import ConfigError, UnsupportedDtypeError

HOST_MEMORY = ("cpu", "cpu_pinned", "cpu_shared")  # device types with shared memory


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
    """Return the elements of an NDArray when they are computed; on the CPU in the NDArray's memory.

    mxnet.base.MXNetError: computing them has failed.
    """
    array.wait_to_read()
    if array.context.device_type not in HOST_MEMORY:
        staged: Array = array.asnumpy().reshape(-1)
        return staged
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
