"""The options of a gradient reduction, for every backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from .._adapter.compressed import CompressedAllreduce, state_of
from .._adapter.gradients import Groups, Reduction


class How(NamedTuple):
    """The options of a gradient reduction.

    Attributes:
        reduction: op, factors and process set.
        compression: a compressor class.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense tensors first.
        groups: the number of groups, or lists of variables; None: one group.
    """

    reduction: Reduction
    compression: Any
    sparse_as_dense: bool
    groups: Groups


def compressed(how: How, name: str, count: int, variables: Sequence[Any]) -> CompressedAllreduce:
    """The operation that reduces gradients with a compression that the reduction executes."""
    return CompressedAllreduce(how.reduction, name, count, how.compression, state_of(variables[0]))
