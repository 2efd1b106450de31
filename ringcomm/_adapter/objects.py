"""Python objects among the ranks of a process set, by name, over the engine."""

from __future__ import annotations

from typing import Any, List, Optional

import cloudpickle
import numpy as np

from .. import api
from ..engine.engine import Engine
from ..process_set import ProcessSet, number_of
from .arguments import wire_name


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: Optional[str] = None,
    process_set: Optional[ProcessSet] = None,
) -> Any:
    """Send any object (pickled by cloudpickle) from the root to all; what others pass is ignored.

    Args:
        root_rank: a rank of the job, which must belong to the process set.

    Returns:
        the root's own object on the root, an equal copy elsewhere.
    """
    engine = api.context().engine
    number = number_of(process_set)
    root = engine.rank == root_rank
    payload = np.frombuffer(cloudpickle.dumps(obj) if root else b"", np.uint8)
    length = np.array([payload.size], np.int64)
    label = wire_name("broadcast_object", name)
    engine.broadcast([length], root_rank, label, [(1,)], number, urgent=True).wait()
    data = payload.copy() if root else np.empty(int(length[0]), np.uint8)
    engine.broadcast([data], root_rank, label and f"{label}.data", [data.shape], number, urgent=True).wait()
    # Only ranks that proved to hold the job's key, running the same user's program, get here.
    return obj if root else cloudpickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: Optional[str] = None, process_set: Optional[ProcessSet] = None
) -> List[Any]:
    """Collect any object (pickled by cloudpickle) from every rank: a list in rank order."""
    engine = api.context().engine
    number = number_of(process_set)
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    label = wire_name("allgather_object", name)
    lengths, gathered = _gathered(engine, payload, label, number)
    stops = np.cumsum(lengths)
    return [
        cloudpickle.loads(gathered[int(stop - length) : int(stop)].tobytes())
        for length, stop in zip(lengths, stops)
    ]


def _gathered(engine: Engine, payload: np.ndarray[Any, Any], label: str, number: int) -> Any:
    length = np.array([payload.size], np.int64)
    handle = engine.allgather([length, payload], [(1,), payload.shape], label, number, urgent=True)
    return handle.wait()
