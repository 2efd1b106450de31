"""PowerSGD: a matrix of gradients as the product of two thin matrices, found by one step of power iteration.

For a matrix M (plus the residual of the last step) every rank computes P = M Q with the last step's Q; the P
of all ranks are averaged; the columns of the average are made orthonormal; every rank computes Q = M' P; the
Q of all ranks are averaged; the result is P Q'. What differs from a rank's own M is its residual.

The two products with M are each rank's own contribution, so BLAS may compute them. What follows an average
must have the same bits on unlike processors: orthogonalization and the last product are element-wise
arithmetic in a fixed order.
"""

from __future__ import annotations

import zlib
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from .feedback import Residuals

_SMALLEST = np.float32(1e-20)
_DEPENDENT = np.float32(1e-5)
"""What is left of a row, relative to the row, if it depends on others: several times float32's rounding."""


class Matrix(NamedTuple):
    """A gradient as a matrix.

    Attributes:
        name: of the parameter.
        rows: the first dimension.
        columns: the product of the others.
    """

    name: str
    rows: int
    columns: int

    @property
    def items(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class PowerIteration:
    """One bucket of matrices: two thin matrices of each, all of one kind in one array that is reduced.

    Args:
        matrices: the members.
        rank: columns of the thin matrices.
        residuals: of this rank.
    """

    def __init__(self, matrices: Sequence[Matrix], rank: int, residuals: Residuals) -> None:
        self._matrices = list(matrices)
        self._rank = rank
        self._residuals = residuals
        self.left = np.zeros(rank * sum(matrix.rows for matrix in matrices), np.float32)
        self.right = np.zeros(rank * sum(matrix.columns for matrix in matrices), np.float32)
        self._starts: Dict[str, Tuple[int, int]] = {}
        rows = columns = 0
        for matrix in self._matrices:
            self._starts[matrix.name] = (rank * rows, rank * columns)
            rows, columns = rows + matrix.rows, columns + matrix.columns
            self._begin(matrix)

    def _thin(self, matrix: Matrix) -> Tuple[Array, Array]:
        """The left and the right thin matrix, one column after the other."""
        left, right = self._starts[matrix.name]
        return (
            self.left[left : left + self._rank * matrix.rows].reshape(self._rank, matrix.rows),
            self.right[right : right + self._rank * matrix.columns].reshape(self._rank, matrix.columns),
        )

    def _begin(self, matrix: Matrix) -> None:
        """Numbers that are the same on all ranks, from the name alone."""
        _, right = self._thin(matrix)
        generator = np.random.Generator(np.random.PCG64(zlib.crc32(matrix.name.encode())))
        whole = generator.integers(-(2**20), 2**20, right.shape)
        right[:] = whole.astype(np.float32) / np.float32(2**20)

    def add_residuals(self, gradients: Sequence[Array]) -> None:
        """Add what was lost before, in place; before :meth:`make_left`.

        Args:
            gradients: float32, flat, one per matrix.
        """
        for matrix, gradient in zip(self._matrices, gradients):
            np.add(gradient, self._residuals.of(matrix.name, matrix.items), out=gradient)

    def make_left(self, gradients: Sequence[Array]) -> None:
        """Fill :attr:`left`, which is then to be averaged over all ranks."""
        for matrix, gradient in zip(self._matrices, gradients):
            left, right = self._thin(matrix)
            np.matmul(right, gradient.reshape(matrix.rows, matrix.columns).T, out=left)

    def make_right(self, gradients: Sequence[Array]) -> None:
        """Orthogonalize :attr:`left` and fill :attr:`right`, which is then to be averaged."""
        for matrix, gradient in zip(self._matrices, gradients):
            left, right = self._thin(matrix)
            with np.errstate(all="ignore"):  # what is not finite stays visible in the result
                orthogonalize(left)
            np.matmul(left, gradient.reshape(matrix.rows, matrix.columns), out=right)

    def finish(self, gradients: Sequence[Array], factor: float = 1.0) -> None:
        """Overwrite the gradients with the product, times a factor, and keep what it lacks as residuals."""
        for matrix, gradient in zip(self._matrices, gradients):
            left, right = self._thin(matrix)
            own = gradient.reshape(matrix.rows, matrix.columns)
            residual = self._residuals.of(matrix.name, matrix.items).reshape(own.shape)
            residual[:] = own
            multiply(left, right, own)
            np.subtract(residual, own, out=residual)
            if not np.isfinite(np.add.reduce(residual, axis=None)):
                residual[:] = 0
                self._begin(matrix)
            if factor != 1.0:
                np.multiply(own, np.float32(factor), out=own)


def multiply(left: Array, right: Array, out: Array) -> None:
    """The sum of the outer products of rows of two arrays, in their order: the same bits everywhere.

    >>> out = np.empty((2, 2), np.float32)
    >>> multiply(np.array([[1, 2]], np.float32), np.array([[3, 4]], np.float32), out); out.tolist()
    [[3.0, 4.0], [6.0, 8.0]]
    """
    step = max(1, 32768 // max(1, out.shape[1]))
    work = np.empty((min(step, out.shape[0]), out.shape[1]), np.float32)
    for start in range(0, out.shape[0], step):
        part = out[start : start + step]
        product = work[: part.shape[0]]
        for index in range(left.shape[0]):
            column = left[index, start : start + step, None]
            if index == 0:
                np.multiply(column, right[index], out=part)
            else:
                np.multiply(column, right[index], out=product)
                np.add(part, product, out=part)


def orthogonalize(vectors: Array) -> None:
    """Make the rows of an array orthonormal, in place, by modified Gram-Schmidt.

    Only additions, multiplications, divisions and square roots of single elements in a fixed order, which
    IEEE 754 defines to the last bit. A row that depends on the earlier ones becomes zero: what rounding
    leaves of it may have any direction, also that of an earlier row, which would then count twice.
    """
    for index in range(vectors.shape[0]):
        own = vectors[index]
        least = _DEPENDENT * np.sqrt(total(own * own))
        least = least if _SMALLEST < least < np.inf else _SMALLEST
        for _ in range(2):  # what rounding leaves of the others is removed by the second pass
            for other in vectors[:index]:
                np.subtract(own, other * total(own * other), out=own)
        length = np.sqrt(total(own * own))
        np.divide(own, length if length > least else np.float32(1.0), out=own)
        if not length > least:
            own[np.isfinite(own)] = 0


def total(values: Array) -> Any:
    """The sum of a float32 array in a fixed order: halves are added until one element is left."""
    work: List[np.float32] = []
    current = values.astype(np.float32)
    while current.size > 1:
        half = current.size // 2
        if current.size % 2:
            work.append(current[-1])
        current = current[:half] + current[half : 2 * half]
    result = np.float32(current[0]) if current.size else np.float32(0)
    for value in work:
        result = np.float32(result + value)
    return result
