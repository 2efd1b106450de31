"""Broadcasts and allgathers of objects, and broadcasts of arrays that ranks create at different times."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Dict, List, MutableMapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.async_calls import wire_name
from ..calls.objects import NOTHING
from ..calls.process_set import ProcessSet, number_of
from ..docstrings import documented
from ..dtypes import Array
from ..engine.engine import Engine
from ..engine.request import Handle
from ..errors import ShapeError
from ..job.context import Context


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


# ---- broadcasts of arrays that ranks create at different times, each in its own sequence -------------------

# A layer may get its parameters only when it first sees data, and another layer first on another rank. A
# broadcast waits for all ranks, so two ranks that broadcast two layers in another sequence would wait for
# each other. Here the root only sends, and does not wait; the other ranks request all arrays together, and
# then wait for the root only. An operation is an allgather to which the root contributes an array, all others
# nothing.
_calls: MutableMapping[Context, Counter[Tuple[str, int]]] = weakref.WeakKeyDictionary()


class Presence(NamedTuple):
    """One rank's report about an array to be broadcast."""

    name: str
    dtype: str
    present: bool  # whether it exists already
    problem: str = ""  # why it cannot be broadcast; empty: it can


def disagreement(ranks: Sequence[int], reports: Sequence[Sequence[Presence]]) -> Optional[str]:
    """Return the error in the reports of ``ranks``, one list of arrays for each, or None."""
    for rank, report in zip(ranks, reports):
        for item in report:
            if item.problem:
                return f"rank {rank}: {item.problem}"
    first = {item.name: item for item in reports[0]}
    for rank, report in zip(ranks[1:], reports[1:]):
        own = {item.name: item for item in report}
        for name in sorted(set(first) ^ set(own)):
            has, lacks = (ranks[0], rank) if name in first else (rank, ranks[0])
            return (
                f"rank {has} has a parameter {name!r}, rank {lacks} does not. All ranks need the same model, "
                "with the same names: give layers a prefix or the model a name scope."
            )
        for name, item in own.items():
            if item.dtype != first[name].dtype:
                there = f"{first[name].dtype} on rank {ranks[0]}"
                return f"parameter {name!r} is {there}, {item.dtype} on rank {rank}."
    return None


class LateBroadcasts:
    """The broadcasts of one call; every rank makes one of these, for the same names and in the same order."""

    def __init__(self, names: Sequence[str], root_rank: int, label: str, process_set: ProcessSet) -> None:
        self.is_root = api.rank() == root_rank
        self._root_rank = root_rank
        self._number = number_of(process_set)
        counter = _calls.setdefault(api.context(), Counter())
        counter[label, self._number] += 1
        # The number of the call: an earlier call's operations on arrays of the same names may be pending.
        self._prefix = f"{label}.{counter[label, self._number]}"
        self._left: List[str] = list(names)
        self._requested: Dict[str, Handle] = {}

    def send(self, name: str, array: Array) -> None:
        """On the root: send a copy of an array, without waiting."""
        self._gather(name, np.frombuffer(array.tobytes(), np.uint8))

    def request(self) -> None:
        """On all other ranks: request all arrays, once."""
        for name in self._left:
            self._requested[name] = self._gather(name, np.empty(0, np.uint8))
        self._left = []

    def receive(self, name: str, target: Array) -> None:
        """On all other ranks: wait for the root's array, and overwrite ``target`` with it."""
        self.request()
        (data,) = self._requested.pop(name).wait()
        if data.size != target.nbytes:
            raise ShapeError(
                f"parameter {name!r} has {target.nbytes // target.itemsize} elements here, and "
                f"{data.size // target.itemsize} on rank {self._root_rank}, the root of the broadcast. All "
                "ranks need the same model."
            )
        target.reshape(-1)[:] = data.view(target.dtype)

    def _gather(self, name: str, data: Array) -> Handle:
        return api.context().engine.allgather(
            [data], [data.shape], wire_name("broadcast", f"{self._prefix}.{name}"), self._number
        )
