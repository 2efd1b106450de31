"""The arrays of a bucket that devices hold: when they are loaded, and when results are stored.

They are loaded when they are submitted (:mod:`ringcomm.arrays`), so here only the rest of that is waited for.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Sequence

from ..collective.mirror import Mirror
from ..collective.runner import Runner
from .request import Request

Mirrors = Dict[int, Mirror]
"""By the identity of the array that is the mirror's block."""


def mirrors_of(requests: Iterable[Optional[Request]]) -> Mirrors:
    """The mirrors of some requests; of arrays in host memory there are none."""
    return {
        id(array): mirror
        for request in requests
        if request is not None and request.mirrors
        for array, mirror in zip(request.arrays, request.mirrors)
        if mirror is not None
    }


def fetch_all(arrays: Sequence[Any], mirrors: Mirrors, runner: Runner) -> None:
    """Wait until those of the arrays that devices hold have been loaded."""
    if mirrors:
        runner.fetch([mirrors[id(array)] for array in arrays if id(array) in mirrors])


def is_shared(array: Any, mirrors: Mirrors) -> bool:
    """Return whether an array is memory of a device that the host uses without a copy."""
    return bool(mirrors) and id(array) in mirrors and mirrors[id(array)].shared


def store_all(arrays: Sequence[Any], mirrors: Mirrors) -> None:
    """Start copying those of the arrays that devices hold back to them."""
    for array in arrays:
        if id(array) in mirrors:
            mirrors[id(array)].store(0, array.nbytes)
