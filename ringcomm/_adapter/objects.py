"""Broadcasts and allgathers of objects."""

from __future__ import annotations

from typing import Any, List, Optional

import numpy as np

from .. import api
from ..calls.async_calls import wire_name
from ..calls.objects import NOTHING
from ..calls.process_set import ProcessSet, number_of
from ..docstrings import documented
from ..engine.engine import Engine


@documented
def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Any:  # fmt: skip
    """Send a Python object from the root to all ranks, pickled by cloudpickle.

    Args:
        obj: the object; used on the root only.
        root_rank: the rank (of the job, not of the process set) that sends; a member of the process set.
        {matching}

    Returns:
        on the root the object itself, on all other ranks an equal copy.

    Raises:
        Misuse: (on every rank) an object cannot be pickled.
        PeerLostError: a rank was lost.
    """
    context = api.context()
    engine, objects = context.engine, context.objects
    number = number_of(process_set)
    root = engine.rank == root_rank
    label = wire_name("broadcast_object", name)
    matched = f"{label} in {number}"
    packed = objects.pack(obj, "broadcast_object", matched) if root else NOTHING
    length = np.array([len(packed.data)], np.int64)
    first = engine.broadcast([length], root_rank, label, [(1,)], number, urgent=True)
    with engine.in_parts():
        first.wait()
        data = np.frombuffer(packed.data, np.uint8) if root else np.empty(int(length[0]), np.uint8)
        second = label and f"{label}.data"
        engine.broadcast([data], root_rank, second, [data.shape], number, urgent=True).wait()
    packed.raise_error()
    return obj if root else objects.unpack(data, root_rank, "broadcast_object", matched)


@documented
def allgather_object(
    obj: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> List[Any]:
    """Collect one Python object from every rank, pickled by cloudpickle.

    Args:
        obj: this rank's object.
        {matching}

    Returns:
        the objects of all ranks, in rank order, the same list on every rank.

    Raises:
        Misuse: (on every rank) an object cannot be pickled.
        PeerLostError: a rank was lost.
    """
    context = api.context()
    engine, objects = context.engine, context.objects
    number = number_of(process_set)
    label = wire_name("allgather_object", name)
    matched = f"{label} in {number}"
    packed = objects.pack(obj, "allgather_object", matched)
    payload = np.frombuffer(packed.data, np.uint8)
    lengths, gathered = _gathered(engine, payload, label, number)
    packed.raise_error()
    stops = np.cumsum(lengths)
    return [
        objects.unpack(gathered[int(stop - length) : int(stop)], rank, "allgather_object", matched)
        for rank, length, stop in zip(engine.sets.members(number), lengths, stops)
    ]


def _gathered(engine: Engine, payload: np.ndarray[Any, Any], label: str, number: int) -> Any:
    length = np.array([payload.size], np.int64)
    handle = engine.allgather([length, payload], [(1,), payload.shape], label, number, urgent=True)
    return handle.wait()
