"""Tensors as flat NumPy arrays that share their memory, and back."""

from __future__ import annotations

from typing import Dict, Tuple

import torch

from ...dtypes import Array, dtype_named
from ...errors import Misuse, UnsupportedDtypeError

_PLAIN = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
)  # fmt: skip
"""The types that NumPy has too."""

_CARRIER: Dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As what other types travel, by their size: NumPy need not understand what it only moves."""


class Flat:
    """A tensor's elements as a flat array in C order.

    Args:
        tensor: on the CPU, of any layout but sparse.
        arithmetic: whether numbers are needed, not only their bytes.

    Attributes:
        array: shares the tensor's memory if that is contiguous; otherwise :meth:`finish` copies it back.
        carried: the elements' type where the array has another of the same size; otherwise empty.

    Raises:
        Misuse: the tensor is not on the CPU, or is sparse.
        UnsupportedDtypeError: arithmetic is asked for, and NumPy cannot compute with the elements.
    """

    __slots__ = ("_copy", "_tensor", "array", "carried")

    def __init__(self, tensor: torch.Tensor, arithmetic: bool = False) -> None:
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._tensor = tensor
        self._copy = None
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Misuse(
                f"The backend 'ringcomm' carries dense tensors in the CPU's memory; this one is on "
                f"{tensor.device} with layout {tensor.layout}."
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = self._copy = tensor.resolve_conj().resolve_neg().contiguous()
        self.array: Array = _array_of(tensor.view(-1), arithmetic)
        self.carried = "" if arithmetic or tensor.dtype in _PLAIN else str(tensor.dtype)

    def finish(self) -> None:
        """Write a copy back, if it was one."""
        if self._copy is not None:
            self._tensor.copy_(self._copy)


def _array_of(flat: torch.Tensor, arithmetic: bool) -> Array:
    dtype = flat.dtype
    array: Array
    if dtype in _PLAIN:
        array = flat.numpy()
    elif dtype == torch.bfloat16 and arithmetic:
        array = flat.view(torch.int16).numpy().view(dtype_named("bfloat16"))
    else:
        carrier = _CARRIER.get(dtype.itemsize)
        if arithmetic or carrier is None:
            what = "reduced" if carrier else "sent"
            raise UnsupportedDtypeError(f"elements of type {dtype} cannot be {what}.")
        array = flat.view(carrier).numpy()
    return array


def flat_array(tensor: torch.Tensor, arithmetic: bool = False) -> Array:
    """The same for a tensor that is only read."""
    return Flat(tensor, arithmetic).array


def even_parts(count: int, size: int) -> Tuple[int, ...]:
    """Boundaries of ``size`` equal parts.

    Raises:
        Misuse: there are none.
    """
    if count % size:
        raise Misuse(f"{count} elements cannot be divided equally among the {size} ranks of this group.")
    return tuple(range(0, count + 1, count // size)) if count else (0,) * (size + 1)
