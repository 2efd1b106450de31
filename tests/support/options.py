"""Every form of every collective with every option, compared with the same in float64."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from ringcomm.ops import ReduceOp

Array = Any
ROWS = 5
"""Of the arrays that are reduced: not divisible by 2 or 3."""
WIDTH = 3


def inputs(kind: str, place: int, size: int, item: int) -> Array:
    """Return what member ``place`` passes as array number ``item``; exact in half types."""
    rows = {"allgather": place + 1, "alltoall": 2 * size}.get(kind, ROWS)
    count = rows * WIDTH
    return (np.arange(count, dtype=np.float32).reshape(rows, WIDTH) % 8 + 2 * place + item) / 4


def options_of(kind: str) -> Iterator[Dict[str, Any]]:
    """All combinations of options; the weight is by the member's place."""
    if kind not in ("allreduce", "reducescatter"):
        yield {"root_rank": 1} if kind == "broadcast" else {}
        return
    scales = ({}, {"prescale_factor": 0.5, "postscale_factor": 4.0})
    for op, scale in itertools.product((ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MAX), scales):
        yield {"op": op, **scale}
        if kind == "reducescatter":
            yield {"op": op, "splits": True, **scale}
        if op != ReduceOp.MAX:
            yield {"op": op, "compression": "int8", **scale}
        if op == ReduceOp.AVERAGE:
            yield {"op": op, "weight": True, **scale}
            yield {"op": op, "weight": True, "compression": "bf16", **scale}
            if kind == "reducescatter":
                yield {"op": op, "splits": True, "weight": True, "compression": "bf16", **scale}


def weight_at(place: int) -> float:
    return float(place + 1)


def splits_at(size: int) -> List[int]:
    """Uneven rows by rank: the first has none, if there are several."""
    return [0, *[1] * (size - 2), ROWS - size + 2] if size > 1 else [ROWS]


def expected(kind: str, options: Dict[str, Any], place: int, size: int, item: int) -> Array:
    """The result of member ``place``, in float64."""
    own = [inputs(kind, member, size, item).astype(np.float64) for member in range(size)]
    if kind == "allgather":
        return np.concatenate(own)
    if kind == "broadcast":
        return own[-1]
    if kind == "alltoall":
        return np.concatenate([array[2 * place : 2 * place + 2] for array in own])
    factors = np.array([weight_at(member) if options.get("weight") else 1.0 for member in range(size)])
    scaled = [array * options.get("prescale_factor", 1.0) for array in own]
    if options["op"] == ReduceOp.MAX:
        total = np.max(scaled, axis=0)
    else:
        total = sum(array * factor for array, factor in zip(scaled, factors))
        if options["op"] == ReduceOp.AVERAGE:
            total = total / factors.sum()
    total = total * options.get("postscale_factor", 1.0)
    if kind == "reducescatter" and options.get("splits"):
        return np.split(total, np.cumsum(splits_at(size))[:-1])[place]
    return np.array_split(total, size)[place] if kind == "reducescatter" else total


def compare_forms(
    module: Any, names: Sequence[str], members: Sequence[int], rank: int, process_set: Any,
    make: Callable[[Array], Any], back: Callable[[Any], Array],
) -> int:  # fmt: skip
    """Make all calls of a member of a set (None: of all ranks), compare, and return the number of calls.
    `make` makes an array of the module, `back` an array of NumPy.
    """
    place, size, calls = list(members).index(rank), len(members), 0
    for name in names:
        grouped, kind, in_place, is_async = parts_of(name)
        if kind == "barrier":
            module.barrier(name="all here", process_set=process_set)
            continue
        for number, options in enumerate(options_of(kind)):
            given = {**options, "process_set": process_set, "name": f"{name}.{number}"}
            if options.get("weight"):
                given["weight"] = weight_at(place)
            if options.get("splits"):
                given["splits"] = splits_at(size)
            if "root_rank" in options:
                given["root_rank"] = members[-1]
            arrays = [_passed(kind, in_place, place, size, item) for item in range(2 if grouped else 1)]
            passed = [make(array) for array in arrays]
            result = getattr(module, name)(passed if grouped else passed[0], **given)
            result = module.synchronize(result) if is_async else result
            if kind == "alltoall" and isinstance(result, tuple):
                result = result[0]
            for item, found in enumerate(result if grouped else [result]):
                right = expected(kind, options, place, size, item)
                loss = {"int8": 0.05, "bf16": 0.02}.get(options.get("compression", ""), 1e-6)
                where = f"{name} {given} on rank {rank} of {members}"
                near = loss * right.max(initial=0.0)
                np.testing.assert_allclose(back(found), right, loss, near, err_msg=where)
                if in_place and kind != "reducescatter":
                    assert found is passed[item], where
            calls += 1
    return calls


def parts_of(name: str) -> Tuple[bool, str, bool, bool]:
    """Whether it is a grouped form, the collective, whether it works in place, and returns a handle."""
    kind = name.replace("grouped_", "").replace("_async", "").rstrip("_")
    return name.startswith("grouped_"), kind, name.endswith("_"), "_async" in name


def _passed(kind: str, in_place: bool, place: int, size: int, item: int) -> Array:
    own = inputs(kind, place, size, item)
    if kind == "allgather" and in_place:
        # Each member holds the rows that `reducescatter` would give it.
        whole = np.concatenate([inputs(kind, member, size, item) for member in range(size)])
        first = sum(len(part) for part in np.array_split(whole, size)[:place])
        mine = np.full_like(whole, np.nan)
        last = first + len(np.array_split(whole, size)[place])
        mine[first:last] = whole[first:last]
        return mine
    return own


def sets_of(size: int) -> List[List[int]]:
    """The process sets that are tried in a job of so many ranks."""
    return {2: [[1]], 3: [[0, 2], [1, 2]]}[size]
