"""Tensors as arguments of collectives, and as arrays.

On the CPU both share memory. CUDA tensors are copied to and from page-locked memory, and no thread waits for
that (:mod:`ringcomm.arrays`). Tensors on other devices are copied while the caller waits.
"""

from __future__ import annotations

from typing import Any, Iterable, List

import numpy as np
import torch

from .. import api
from ..arrays.kinds import device_kind
from ..arrays.operands import Operand, submitted
from ..arrays.torch_tensors import NO_VALUES, TensorOperand, elements_of, not_dense
from ..dtypes import Array
from ..errors import ConfigError


def first_elements(tensor: torch.Tensor) -> Array:
    """Return the first elements of a tensor's first row as float32; none of complex ones and subclasses."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_complex() or not tensor.numel():
        return np.empty(0, np.float32)
    row = tensor.detach()[(0,) * (tensor.dim() - 1)].reshape(-1)[:8]
    return elements_of(row.to("cpu", torch.float32))


def array_of(tensor: torch.Tensor, what: str) -> Array:
    """Return a dense tensor of any device as a read-only array; ``what`` is the collective, for errors."""
    operand = TensorOperand(dense(tensor, what))
    return operand.flat.reshape(operand.shape)


def like_parameter(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return contiguous ``values`` with the strides of a parameter, which fused optimizers rely on.

    They stay contiguous if the parameter is contiguous or of another shape.
    """
    if parameter.is_contiguous() or values.shape != parameter.shape:
        return values
    return torch.empty_like(parameter.detach(), dtype=values.dtype, device=values.device).copy_(values)


def dense(tensor: Any, what: str) -> torch.Tensor:
    """Return the tensor; ConfigError if it is not a tensor, not dense, or without values."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"{what} works on tensors, not on {type(tensor).__name__} ({tensor!r:.40}); use "
            "torch.as_tensor()."
        )
    other = not_dense(tensor)
    if other:
        more = " Or use sparse_allreduce_async()." if tensor.layout is torch.sparse_coo else ""
        raise ConfigError(f"{what} works on dense tensors, not on {other}{more}")
    if tensor.is_meta:
        raise ConfigError(f"{what}: a tensor of shape {tuple(tensor.shape)} is {NO_VALUES}")
    return tensor


def all_dense(tensors: Iterable[Any], what: str) -> List[torch.Tensor]:
    """Return the tensors themselves as a list; see :func:`dense`."""
    return [dense(tensor, what) for tensor in tensors]


def operand_of(
    tensor: Any, what: str, in_place: bool = False, read: bool = True, rows: bool = False, waits: bool = False
) -> Operand:
    """Return a tensor as the argument of a collective of the engine, named ``what`` in errors.

    ``in_place``: the result overwrites the tensor. ``read``: the collective reads it on this rank. ``rows``:
    the result has other rows; :meth:`Operand.deliver` makes it. ``waits``: the caller waits for the result,
    so that a tensor of the CPU need not be copied; only with ``rows``. ConfigError: not a dense tensor.
    UnsupportedDtypeError: its elements cannot be sent.
    """
    if device_kind(dense(tensor, what)) is not None:
        return submitted(api.context().staging, tensor, what if in_place else "", read, rows)
    return TensorOperand(tensor, copied=not (in_place or waits))
