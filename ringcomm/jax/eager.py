"""JAX arrays as NumPy arrays and back, outside of compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 64  # JAX takes over memory without a copy if its address is a multiple of this

_SHARED_FROM_BYTES = 4096  # below this a copy takes less time than handing memory over


def to_host(operand: Any, copy: bool) -> Any:
    """Return a JAX array as a contiguous NumPy array; with ``copy`` in new, writable memory."""
    array = np.asarray(operand)
    if not copy:
        return np.asarray(array, order="C")  # np.ascontiguousarray() makes a row of a scalar
    own = aligned(array.shape, array.dtype)
    np.copyto(own, array)
    return own


def aligned(shape: Any, dtype: Any) -> Any:
    """Return an uninitialized array whose memory JAX can take over."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(shape)


def from_host(array: Any, like: Any) -> Any:
    """Return a JAX array with the elements of a NumPy array, on the device of ``like``.

    The NumPy array must not be written to after this.
    """
    share = array.nbytes >= _SHARED_FROM_BYTES and array.dtype.kind in "iufc"
    result = jnp.from_dlpack(array) if share else jnp.asarray(array)
    device = getattr(like, "sharding", None)
    on_accelerator = device is not None and next(iter(device.device_set)).platform != "cpu"
    if on_accelerator:  # pragma: no cover - needs a GPU or a TPU
        return jax.device_put(result, device)
    return result
