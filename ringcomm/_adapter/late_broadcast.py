"""Broadcasts of arrays that ranks create at different times, each in its own sequence.

A layer may get its parameters only when it first sees data, and another layer first on another rank. A
broadcast waits for all ranks, so two ranks that broadcast two layers in another sequence would wait for each
other. Here the root only sends, and does not wait; the other ranks request all arrays together, and then wait
for the root only. An operation is an allgather to which the root contributes an array, all others nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Dict, List, MutableMapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, number_of
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ShapeError
from ..job.context import Context
from .arguments import wire_name

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
    """The broadcasts of one call; every rank makes one of these, for the same names.

    ``root_rank`` is a rank of the job. Calls with the same label are in the same order on all ranks.
    """

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
        """On all other ranks: wait for the root's array, and overwrite ``target`` with it.

        ShapeError: its size differs from that of ``target``.
        """
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
