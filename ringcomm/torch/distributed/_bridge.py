"""Tensors as flat NumPy arrays that share their memory, and back."""

from __future__ import annotations

from typing import Dict, Tuple

import torch

from ...arrays.torch_tensors import elements_of
from ...dtypes import Array, dtype_named
from ...errors import Misuse, UnsupportedDtypeError

_PLAIN = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
)  # fmt: skip
"""The dtypes that NumPy has, too."""

_DTYPE_OF_SIZE: Dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype by which other dtypes are moved, by their size in bytes: only their bytes matter."""


class Flat:
    """A tensor's elements as a flat array in C order.

    Args:
        tensor: on the CPU, of any layout but sparse.
        arithmetic: whether the elements are computed with, not only moved.

    Attributes:
        array: shares the tensor's memory if that is contiguous; otherwise :meth:`finish` copies it back.
        moved_as: the tensor's dtype if the array has another dtype of the same size; otherwise empty.

    Raises:
        Misuse: the tensor is not on the CPU, or is sparse.
        UnsupportedDtypeError: ``arithmetic``, and NumPy cannot compute with the elements.
    """

    __slots__ = ("_copy", "_tensor", "array", "moved_as")

    def __init__(self, tensor: torch.Tensor, arithmetic: bool = False) -> None:
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._tensor = tensor
        self._copy = None
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Misuse(
                f"The backend 'ringcomm' supports dense tensors in the CPU's memory; this one is on "
                f"{tensor.device} with layout {tensor.layout}."
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = self._copy = tensor.resolve_conj().resolve_neg().contiguous()
        self.array: Array = _array_of(tensor.view(-1), arithmetic)
        self.moved_as = "" if arithmetic or tensor.dtype in _PLAIN else str(tensor.dtype)

    def finish(self) -> None:
        """Write the copy back, if there is one."""
        if self._copy is not None:
            self._tensor.copy_(self._copy)


def _array_of(flat: torch.Tensor, arithmetic: bool) -> Array:
    dtype = flat.dtype
    array: Array
    if dtype in _PLAIN:
        array = elements_of(flat)
    elif dtype == torch.bfloat16 and arithmetic:
        array = elements_of(flat.view(torch.int16)).view(dtype_named("bfloat16"))
    else:
        moved_as = _DTYPE_OF_SIZE.get(dtype.itemsize)
        if arithmetic or moved_as is None:
            what = "reduced" if moved_as else "sent"
            raise UnsupportedDtypeError(f"elements of type {dtype} cannot be {what}.")
        array = elements_of(flat.view(moved_as))
    return array


def flat_array(tensor: torch.Tensor, arithmetic: bool = False) -> Array:
    """A tensor's elements as a flat array in C order, to be read only."""
    return Flat(tensor, arithmetic).array


def even_parts(count: int, size: int) -> Tuple[int, ...]:
    """Boundaries of ``size`` equal parts.

    Raises:
        Misuse: the elements cannot be divided equally.
    """
    if count % size:
        raise Misuse(f"{count} elements cannot be divided equally among the {size} ranks of this group.")
    return tuple(range(0, count + 1, count // size)) if count else (0,) * (size + 1)
