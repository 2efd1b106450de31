"""Converts tensors to the flat NumPy arrays of the engine, and back.

On the CPU both share memory. Tensors on other devices are staged in host memory (pinned for CUDA).
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import numpy as np
import torch

from ..dtypes import Array, dtype_named
from ..errors import ConfigError, UnsupportedDtypeError


def flat_array(tensor: torch.Tensor) -> Array:
    """The elements of a contiguous CPU tensor, sharing its memory.

    Raises:
        UnsupportedDtypeError: NumPy has no such dtype.
    """
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        bits: Array = flat.view(torch.int16).numpy()
        return bits.view(dtype_named("bfloat16"))
    try:
        array: Array = flat.numpy()
    except (TypeError, RuntimeError) as problem:
        raise UnsupportedDtypeError(f"a tensor of {tensor.dtype} cannot be sent: {problem}") from None
    return array


def bytes_of(tensor: torch.Tensor) -> Array:
    """All bytes of a dense tensor of any device and dtype, as uint8."""
    flat: Array = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def tensor_of(array: Array, like: torch.Tensor) -> torch.Tensor:
    """A tensor of an array's elements, on the device of another tensor."""
    shape = array.shape
    flat = array.reshape(-1)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(flat)
    return tensor.view(shape).to(like.device)


def plain(tensor: Any, what: str) -> torch.Tensor:
    """The tensor, detached from autograd.

    Args:
        tensor: what the caller has passed.
        what: the collective, for error texts.

    Raises:
        ConfigError: it is not a tensor, or not dense.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} works on tensors, not on {type(tensor).__name__}; use torch.as_tensor().")
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"{what} works on dense tensors, not on {tensor.layout}: use sparse_allreduce_async() or "
            "tensor.to_dense()."
        )
    bare = tensor.detach()
    if bare.is_complex():
        bare = bare.resolve_conj()
    return bare.resolve_neg()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in host memory and in C order, without a copy if possible."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return _staged(tensor)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor in host memory and in C order."""
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return _staged(tensor)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    host.copy_(tensor)
    return host


class InPlace:
    """A tensor that is to be overwritten.

    Args:
        tensor: a dense tensor on any device.
        what: the collective, for error texts.

    Attributes:
        host: its elements in host memory and in C order; the tensor's own memory if possible.
    """

    def __init__(self, tensor: Any, what: str) -> None:
        self.tensor = tensor
        bare = plain(tensor, what)
        self.host = on_host(bare)
        self._target: Optional[torch.Tensor] = (
            None if self.host.data_ptr() == tensor.data_ptr() else tensor.detach()
        )

    def finish(self) -> Any:
        """Write staged elements back, and return the caller's own tensor."""
        if self._target is not None:
            self._target.copy_(self.host)
        return self.tensor


def back_to(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """A result in host memory, moved to a device."""
    return host if device.type == "cpu" else host.to(device)


def shapes_of(tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """The tensors' shapes as tuples."""
    return [tuple(tensor.shape) for tensor in tensors]


Convert = Callable[[Any], Any]
