"""Converts tensors to the flat NumPy arrays of the engine, and back.

On the CPU both share memory. CUDA tensors are copied to and from page-locked memory, and no thread waits for
that (:mod:`ringcomm.arrays`). Tensors on other devices are copied while the caller waits.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

from .. import api
from ..arrays.kinds import device_kind
from ..arrays.operands import Operand, submitted
from ..arrays.torch_tensors import elements_of
from ..dtypes import Array
from ..errors import ConfigError


def flat_array(tensor: torch.Tensor) -> Array:
    """Return the elements of a contiguous CPU tensor, sharing its memory.

    Raises:
        UnsupportedDtypeError: NumPy has no such dtype.
    """
    return elements_of(tensor.detach().view(-1))


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return all bytes of a dense tensor of any device and dtype, as uint8."""
    return elements_of(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8))


def tensor_of(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of an array's elements, on the device of another tensor."""
    shape = array.shape
    flat = array.reshape(-1)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(flat)
    return tensor.view(shape).to(like.device)


def like_parameter(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient or a state with the strides of its parameter, which fused optimizers rely on.

    Args:
        values: contiguous; as they are if the parameter is contiguous too, or of another shape.
        parameter: for example with channels last.
    """
    if parameter.is_contiguous() or values.shape != parameter.shape:
        return values
    return torch.empty_like(parameter.detach(), dtype=values.dtype, device=values.device).copy_(values)


def plain(tensor: Any, what: str) -> torch.Tensor:
    """Return the tensor, detached from autograd.

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
    """Return a dense tensor in host memory and in C order, without a copy if possible."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    return _staged(tensor)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which the calling thread waits for."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    host.copy_(tensor)
    return host


class InPlace:
    """A tensor that is to be overwritten, as an argument of the engine.

    Args:
        tensor: a dense tensor on any device.
        what: the collective, for error texts.
        read: whether the collective reads it on this rank.

    Attributes:
        flat: its elements in host memory and in C order, flat; the tensor's own memory if possible.
        shape: of the tensor.
        mirror: of a tensor on a CUDA device, which is being copied to ``flat``; otherwise None.
    """

    def __init__(self, tensor: Any, what: str, read: bool = True) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
        self.mirror: Optional[Any] = None
        self._argument: Optional[Operand] = None
        bare = plain(tensor, what)
        if device_kind(bare) is not None:
            argument = self._argument = submitted(api.context().staging, bare, what, read)
            self.flat, self.mirror = argument.flat, argument.mirror
            self._moved: Optional[torch.Tensor] = bare
        else:
            self._moved = on_host(bare)
            self.flat = flat_array(self._moved)
        if self._moved.data_ptr() == tensor.data_ptr():
            self._moved = None

    def finish(self) -> Any:
        """Write copied elements back, and return the caller's own tensor."""
        if self._argument is not None:
            self._argument.finish()
        if self._moved is not None:
            self.tensor.detach().copy_(self._moved)
        return self.tensor


class Copied:
    """A copy of a tensor as an argument of the engine, which becomes the result.

    The attributes are those of :class:`InPlace`.

    Args:
        tensor: a dense tensor on any device.
        what: the collective, for error texts.
        read: whether the collective reads it on this rank.
    """

    def __init__(self, tensor: Any, what: str, read: bool = True) -> None:
        bare = plain(tensor, what)
        self.shape = tuple(bare.shape)
        self.mirror: Optional[Any] = None
        self._device = bare.device
        self._argument: Optional[Operand] = None
        if device_kind(bare) is not None:
            argument = self._argument = submitted(api.context().staging, bare, read=read)
            self.flat, self.mirror = argument.flat, argument.mirror
        else:
            self._host = _copy(bare)
            self.flat = flat_array(self._host)

    def finish(self) -> torch.Tensor:
        """Return the result, on the tensor's device."""
        if self._argument is not None:
            result: Any = self._argument.finish()
            return result
        return self._host if self._device.type == "cpu" else self._host.to(self._device)


class Moved:
    """A tensor of which rows are moved, as an argument of the engine; the result is a new tensor.

    Args:
        tensor: a dense tensor on any device.
        what: the collective, for error texts.
        waits: whether the caller waits for the result, so that a tensor of the CPU need not be copied.

    Attributes:
        flat, shape, mirror: as of :class:`InPlace`.
    """

    def __init__(self, tensor: Any, what: str, waits: bool = False) -> None:
        self._like = bare = plain(tensor, what)
        self.shape = tuple(bare.shape)
        self.mirror: Optional[Any] = None
        self._rows: Optional[Operand] = None
        if device_kind(bare) is not None:
            rows = self._rows = submitted(api.context().staging, bare, rows=True)
            self.flat, self.mirror = rows.flat, rows.mirror
        else:
            self.flat = flat_array(on_host(bare) if waits else _copy(bare))

    def deliver(self, array: Array) -> torch.Tensor:
        """Return the result, of which the engine gives the elements, on the tensor's device."""
        if self._rows is not None:
            result: Any = self._rows.deliver(array)
            return result
        return tensor_of(array, self._like)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor in host memory and in C order."""
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return _staged(tensor)
