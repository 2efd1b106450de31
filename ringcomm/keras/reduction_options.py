"""How gradients are reduced, on every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._adapter.gradients import Groups, Reduction


class How(NamedTuple):
    """How gradients are reduced.

    Attributes:
        reduction: how they become one.
        compression: how they travel.
        sparse_as_dense: make ``tf.IndexedSlices`` dense.
        groups: which ones travel together.
    """

    reduction: Reduction
    compression: Any
    sparse_as_dense: bool
    groups: Groups
