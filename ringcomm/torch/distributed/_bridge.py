"""PyTorch's tensors, types and reductions, as those of ringcomm: flat arrays that share their memory."""

from __future__ import annotations

import zlib
from functools import lru_cache
from math import prod
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...arrays.torch_tensors import TensorOperand
from ...collective.reduce import multiply
from ...collective.rows import check_rows, cumulative, row_counts
from ...dtypes import Array
from ...errors import Misuse, UnsupportedDtypeError
from ...ops import Bitwise, ReduceOp

# The dtypes that NumPy also has.
_PLAIN = frozenset(
    (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
)  # fmt: skip

_REDUCIBLE = _PLAIN | {torch.bfloat16}

# The dtype by which other dtypes are moved, by their size in bytes: only their bytes matter.
_WORDS: Dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or if NumPy does not have its dtype, its memory as integers of the same size.

    UnsupportedDtypeError: there are no integers of that size.
    """
    if tensor.dtype in _PLAIN:
        return tensor
    word = _WORDS.get(tensor.dtype.itemsize)
    if word is None:
        raise UnsupportedDtypeError(f"elements of type {tensor.dtype} cannot be sent.")
    return tensor.view(word)


def tensors_inside(value: Any) -> List[str]:
    """Return the names of the tensors that hold the elements of a tensor which only wraps them.

    Nested lists of tensors of one class count as a tensor. Misuse: one of them has another shape, such as the
    local part of a DTensor.
    """
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if type(value) in (torch.Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(value):
        return []
    names: List[str] = value.__tensor_flatten__()[0]
    if any(getattr(value, name).shape != value.shape for name in names):
        kind = type(value).__name__
        raise Misuse(f"a {kind} cannot be sent as a whole. Send the tensors that it consists of.")
    return names


def inside(value: Any, name: str) -> Any:
    """Return the tensor of this name in a tensor; of nested lists of tensors, such lists of these."""
    if type(value) in (list, tuple):
        return [inside(item, name) for item in value]
    return getattr(value, name) if isinstance(value, torch.Tensor) else value


class GroupOperand(TensorOperand):
    """A CPU tensor that the result of an operation overwrites.

    ``moved_as`` is its dtype as text if :attr:`flat` has another dtype of the same size, else "".
    ``arithmetic``: the elements are computed with, not only moved. Misuse: the tensor is sparse or not on the
    CPU. UnsupportedDtypeError: the elements cannot be sent, or not be computed with.
    """

    __slots__ = ("_arithmetic", "element", "moved_as")

    def __init__(self, tensor: torch.Tensor, arithmetic: bool = False) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Misuse(
                f"The backend 'ringcomm' supports dense tensors in the CPU's memory; this one is on "
                f"{tensor.device} with layout {tensor.layout}."
            )
        if arithmetic and tensor.dtype not in _REDUCIBLE:
            raise UnsupportedDtypeError(f"elements of type {tensor.dtype} cannot be reduced.")
        self._arithmetic = arithmetic
        super().__init__(tensor)

    def _elements(self, host: torch.Tensor) -> Array:
        moved = host if self._arithmetic else movable(host)
        self.element = host.dtype
        self.moved_as = "" if moved is host else str(host.dtype)
        return super()._elements(moved)


class Parts:
    """Parts of a flat array: of one tensor, which is divided, or several tensors, side by side.

    ``bounds`` are the parts' boundaries in the array. ``space`` is the memory for it, to which tensors are
    copied; None: the memory of the only tensor.
    """

    __slots__ = ("_copies", "array", "bounds", "element", "operands")

    def __init__(
        self, operands: List[GroupOperand], bounds: Tuple[int, ...], space: Optional[Array] = None
    ) -> None:
        self.operands = operands
        self.bounds = bounds
        self.element = operands[0].element
        self._copies = space is not None
        self.array: Array = operands[0].flat if space is None else space

    def load(self) -> Array:
        """Return the array, after copying the tensors to it."""
        if self._copies:
            np.concatenate([operand.flat for operand in self.operands], out=self.array)
        return self.array

    def part(self, number: int) -> Array:
        """Return one part of the array."""
        return self.array[self.bounds[number] : self.bounds[number + 1]]

    def finish(self) -> None:
        """Copy the array back to the tensors."""
        start = 0
        for operand in self.operands:
            if self._copies:
                start, begin = start + operand.flat.size, start
                operand.flat[...] = self.array[begin:start]
            operand.finish()


def bounds_of(tensors: Sequence[torch.Tensor]) -> Tuple[int, ...]:
    """Return the offsets of tensors in a concatenation."""
    return cumulative(tensor.numel() for tensor in tensors)


def even_parts(count: int, size: int) -> Tuple[int, ...]:
    """Return the boundaries of ``size`` equal parts; Misuse if the elements cannot be divided equally."""
    if count % size:
        raise Misuse(f"{count} elements cannot be divided equally among the {size} ranks of this group.")
    return tuple(range(0, count + 1, count // size)) if count else (0,) * (size + 1)


def row_parts(tensor: torch.Tensor, rows: Sequence[Any], size: int) -> Tuple[int, ...]:
    """Return the boundaries of parts with these numbers of rows of a tensor; Misuse if the sum is wrong."""
    check_rows("alltoall", [tensor.shape])
    return cumulative(row_counts(int(tensor.shape[0]), rows, size), prod(tensor.shape[1:]))


@lru_cache(maxsize=None)
def type_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype: 32 bits, the same in all versions of PyTorch, never 0."""
    return zlib.crc32(str(dtype).encode()) or 1


def type_name(code: int) -> str:
    """Return the name of the dtype with this code, for example ``float32``."""
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype) and type_code(dtype) == code:
            return str(dtype).replace("torch.", "")
    return "a type that this PyTorch does not have"


_KIND = dist.ReduceOp.RedOpType

_OPS: Dict[Any, Union[ReduceOp, Bitwise]] = {
    _KIND.SUM: ReduceOp.SUM,
    _KIND.AVG: ReduceOp.AVERAGE,
    _KIND.MIN: ReduceOp.MIN,
    _KIND.MAX: ReduceOp.MAX,
    _KIND.PRODUCT: ReduceOp.PRODUCT,
    _KIND.BAND: Bitwise.BAND,
    _KIND.BOR: Bitwise.BOR,
    _KIND.BXOR: Bitwise.BXOR,
}


class GroupReduction(NamedTuple):
    """A reduction operation."""

    op: Any
    factor: float = 1.0  # this rank's contribution is multiplied by it
    name: str = ""  # in message headers

    @classmethod
    def of(cls, op: Any) -> GroupReduction:
        """Return the reduction for a ``ReduceOp`` of PyTorch; Misuse if the backend has none."""
        kind = getattr(op, "op", op)
        found = _KNOWN.get(kind)
        if found is not None:
            return found
        if kind == _KIND.PREMUL_SUM:
            # All ranks must multiply; the factors may differ.
            return cls(ReduceOp.SUM, _number(op.factor), "PREMUL_SUM")
        raise Misuse(f"{op!r} is not a reduction that the backend 'ringcomm' supports.")

    @property
    def code(self) -> int:
        """Return its number in message headers."""
        return int(self.op)

    def labelled(self, label: str) -> GroupReduction:
        """Return the same reduction with a label appended to its name."""
        return self._replace(name=f"{self.name} {label}".strip())

    def prepare(self, contribution: Array) -> None:
        """Multiply this rank's contribution by its factor, in place."""
        multiply(contribution, self.factor)


_KNOWN: Dict[Any, GroupReduction] = {kind: GroupReduction(op) for kind, op in _OPS.items()}


def _number(factor: Any) -> float:
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise Misuse("PREMUL_SUM needs one factor for the whole tensor, not a tensor of factors.")
    return float(factor)
