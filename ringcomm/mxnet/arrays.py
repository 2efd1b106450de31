"""Converts NDArrays to the flat NumPy arrays of the engine, and back.

On the CPU both share memory. NDArrays on GPUs are copied through host memory.

MXNet computes in its own threads: an NDArray is read only after what was to be written to it is written, and
overwritten only after what was to read it has read it.
"""

from __future__ import annotations

import ctypes
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ..dtypes import Array
from ..errors import ConfigError

HOST_MEMORY = ("cpu", "cpu_pinned", "cpu_shared")
"""The device types whose memory is shared."""


class _Memory:
    """The memory of an NDArray, for NumPy. NumPy's array holds this, and this holds the NDArray."""

    def __init__(self, array: mx.nd.NDArray, address: int, items: int, dtype: np.dtype[Any]) -> None:
        self.owner = array
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": (items,), "typestr": dtype.str,
        }  # fmt: skip


def dense(tensor: Any, what: str) -> mx.nd.NDArray:
    """The NDArray itself.

    Args:
        tensor: what the caller has passed.
        what: the collective, for error texts.

    Raises:
        ConfigError: it is not an NDArray, or not dense.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        raise ConfigError(f"{what} works on NDArrays, not on {type(tensor).__name__}; use mx.nd.array().")
    if tensor.stype != "default":
        raise ConfigError(
            f"{what} works on dense NDArrays, not on {tensor.stype} ones: use tensor.tostype('default'), "
            "and for gradients a layer with sparse_grad=False."
        )
    return tensor


def flat_array(array: mx.nd.NDArray) -> Array:
    """The elements of an NDArray as soon as they are computed; on the CPU in the NDArray's own memory.

    Raises:
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


class InPlace:
    """An NDArray that is to be overwritten.

    Args:
        array: a dense NDArray on any device.

    Attributes:
        flat: its elements; in its own memory on the CPU.
    """

    def __init__(self, array: mx.nd.NDArray) -> None:
        self.array = array
        self.flat = flat_array(array)
        self._staged = array.context.device_type not in HOST_MEMORY
        if not self._staged:
            check_call(_LIB.MXNDArrayWaitToWrite(array.handle))

    @property
    def shape(self) -> Tuple[int, ...]:
        """The NDArray's shape."""
        return tuple(self.array.shape)

    def finish(self) -> mx.nd.NDArray:
        """Copy staged elements back, and return the NDArray."""
        if self._staged:
            self.array[:] = self.flat.reshape(self.shape)
        return self.array


def copy_of(array: mx.nd.NDArray) -> InPlace:
    """A new NDArray with the elements of another one, on the same device."""
    return _filled(flat_array(array), array.shape, array)


def ndarray_of(array: Array, like: mx.nd.NDArray) -> mx.nd.NDArray:
    """A new NDArray with an array's elements, on the device of another NDArray and of its class."""
    return _filled(array.reshape(-1), array.shape, like).finish()


def _filled(flat: Array, shape: Sequence[int], like: mx.nd.NDArray) -> InPlace:
    module = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    target = InPlace(module.empty(tuple(shape), dtype=flat.dtype, ctx=like.context))
    target.flat[:] = flat
    return target


def shapes_of(tensors: Sequence[mx.nd.NDArray]) -> List[Tuple[int, ...]]:
    """The shapes of NDArrays."""
    return [tuple(tensor.shape) for tensor in tensors]
