"""Many arrays as one: which tensors of a bucket travel together, and how they get in and out of one buffer.

How a bucket is divided depends on signatures alone, never on anything that may differ between ranks: all of
them must make the same calls.
"""

from __future__ import annotations

from math import prod
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..codec.base import BLOCK_ITEMS
from ..collective.mirror import Mirror
from ..collective.runner import Runner
from ..configuration.bucket_sizes import ALONE_BYTES
from ..dtypes import Array, dtype_named
from ..errors import RingcommError
from ..ops import ReduceOp
from ..wire.signature import Key, Signature
from .request import Request

Mirrors = Dict[int, Mirror]
"""Of arrays that devices hold, by the identity of the array that is the mirror's block. They are loaded when
they are submitted (:mod:`ringcomm.arrays`), so here only the rest of that is waited for."""
Work = Tuple[Signature, Optional[Request]]
"""A member of a bucket; without a request if this rank has joined, and contributes nothing."""


class FusionBuffer:
    """Memory in which small tensors travel side by side; kept, and grown when needed."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def items(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Room for so many elements."""
        nbytes = count * dtype.itemsize
        if self._bytes.size < nbytes:
            from ..transport.arena import shared_room  # a program of small arrays does not load it

            shared = shared_room(nbytes)
            self._bytes = np.empty(nbytes, np.uint8) if shared is None else shared
        room: Array = self._bytes[:nbytes].view(dtype)
        return room


def bucket_text(bucket: Sequence[Work]) -> str:
    """Return what a bucket is for, in the program's own terms."""
    signature, request = bucket[0]
    key = Key(signature.process_set, signature.name, 0) if request is None else request.key
    others = len(bucket) - 1
    more = "" if not others else " and another" if others == 1 else f" and {others} others"
    return f"{signature.describe(named=False)} {key}{more}"


def nothing() -> None:
    """In place of a function that unpacks: the results are in place already."""


def arrays_of(work: Work) -> List[Array]:
    """The arrays of a member; neutral ones if this rank has joined."""
    signature, request = work
    if request is not None:
        return request.arrays
    return [
        neutral(prod(shape), dtype_named(dtype), ReduceOp(signature.op), signature.prescale)
        for shape, dtype in zip(signature.shapes, signature.dtypes)
    ]


def neutral(count: int, dtype: np.dtype[Any], op: ReduceOp, prescale: float = 1.0) -> Array:
    """Return the neutral contribution: it leaves the other ranks' numbers as they are."""
    if op == ReduceOp.PRODUCT:
        return np.ones(count, dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and prescale != 0.0:  # times 0 everything is 0
        highest = (op == ReduceOp.MIN) == (prescale > 0.0)
        if dtype.kind == "b":
            return np.full(count, highest, dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return np.full(count, info.max if highest else info.min, dtype)
        return np.full(count, np.inf if highest else -np.inf).astype(dtype)
    return np.zeros(count, dtype)


def residuals_of(work: Work) -> Sequence[Optional[Array]]:
    """The residuals of a member, one for each array; None where there is no error feedback."""
    signature, request = work
    given: Sequence[Optional[Array]] = () if request is None else request.residuals
    return given or [None] * len(signature.shapes)


def side_by_side(
    group: Sequence[Array], buffer: FusionBuffer, note: Optional[Callable[[str], None]] = None
) -> Tuple[Array, Callable[[], None]]:
    """Return the arrays of one type as one, and what brings the results back.

    Neighbours in memory stay in place, others are copied to the buffer. ``note`` is called with the name of
    each copy as it begins, and with "" at its end.
    """
    if len(group) == 1:
        return group[0], nothing
    joined = as_one(group)
    if joined is not None:
        return joined, nothing
    packed = buffer.items(sum([array.size for array in group]), group[0].dtype)
    if note is not None:
        note("MEMCPY_IN_FUSION_BUFFER")
    np.concatenate(group, out=packed)
    if note is not None:
        note("")

    def unpack() -> None:
        if note is not None:
            note("MEMCPY_OUT_FUSION_BUFFER")
        start = 0
        for array in group:
            stop = start + array.size
            array[:] = packed[start:stop]
            start = stop
        if note is not None:
            note("")

    return packed, unpack


def in_blocks(group: Sequence[Array], buffer: FusionBuffer) -> Tuple[Array, Callable[[], None]]:
    """As :func:`side_by_side`, each array from the start of a codec's block on."""
    if len(group) == 1:
        return group[0], nothing
    starts = [0]
    for array in group:
        starts.append(starts[-1] + -(-array.size // BLOCK_ITEMS) * BLOCK_ITEMS)
    packed = buffer.items(starts[-1], group[0].dtype)
    for array, start, stop in zip(group, starts, starts[1:]):
        packed[start : start + array.size] = array
        packed[start + array.size : stop] = 0

    def unpack() -> None:
        for array, start in zip(group, starts):
            array[:] = packed[start : start + array.size]

    return packed, unpack


def tensors_of(bucket: Sequence[Work]) -> List[Tuple[Array, Tuple[int, ...]]]:
    """Every array with its shape as the signature has it."""
    return [(array, shape) for work in bucket for array, shape in zip(arrays_of(work), work[0].shapes)]


def per_work(outputs: Sequence[Any], bucket: Sequence[Work]) -> List[Any]:
    """The outputs as lists, one per member; an error in place of those of which one is an error."""
    results: List[Any] = []
    start = 0
    for signature, _ in bucket:
        stop = start + len(signature.shapes)
        problems = [item for item in outputs[start:stop] if isinstance(item, RingcommError)]
        results.append(problems[0] if problems else list(outputs[start:stop]))
        start = stop
    return results


def groups_by_index(arrays: Sequence[Array], sizes: Sequence[int] = ()) -> List[List[int]]:
    """Return which arrays travel as one: small ones of the same type together, large ones alone.

    ``sizes``: the number of elements over all ranks, where the ranks' arrays may differ in length.
    """
    groups: List[List[int]] = []
    small: Dict[np.dtype[Any], List[int]] = {}
    for index, array in enumerate(arrays):
        size = sizes[index] if sizes else array.size
        if size * array.itemsize >= ALONE_BYTES:
            groups.append([index])
        elif array.dtype in small:
            small[array.dtype].append(index)
        else:
            small[array.dtype] = [index]
            groups.append(small[array.dtype])
    return groups


def as_one(arrays: Sequence[Array]) -> Optional[Array]:
    """One array over all of these if they follow each other in the memory of one owner."""
    first = arrays[0]
    owner = first.base
    if owner is None:
        return None
    end = first.__array_interface__["data"][0] + first.nbytes
    for array in arrays[1:]:
        if array.base is not owner or array.__array_interface__["data"][0] != end:
            return None
        end += array.nbytes
    total = sum([array.size for array in arrays])
    return np.lib.stride_tricks.as_strided(first, (total,), (first.itemsize,))


# ---- arrays on devices ---------------------------------------------------------------------------


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
