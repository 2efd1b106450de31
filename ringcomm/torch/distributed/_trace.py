"""Process groups in the timeline: each sort of collective is a row, from the call to its end.

All groups of a process write into one timeline: that of the job, if ``ringrun`` (or the program) has put
this process into one, and otherwise that of the default group.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Dict, List, Optional, Set, Union

import torch

from ... import api
from ...engine.heartbeat import Vigil
from ...engine.observer import Observer
from ...engine.single_rank import OwnTrace

_home: Optional[weakref.ref[Union[Vigil, OwnTrace]]] = None
_lock = threading.Lock()
_open: Dict[str, Set[int]] = {}


def write_here(bearer: Union[Vigil, OwnTrace]) -> None:
    """From now on collectives are told to whoever observes this one, unless the process is in a job."""
    global _home
    _home = weakref.ref(bearer)


def observer() -> Optional[Observer]:
    """Who is told of collectives, if anybody is."""
    if api.is_initialized():
        return api.context().engine.observer
    bearer = _home() if _home is not None else None
    return None if bearer is None else bearer.observer


class Traced:
    """One collective in the timeline. A context manager around its execution.

    Args:
        observer: is told.
        group: the group's name.
        what: like ``allreduce``.
        result: the tensors, in lists or not.
    """

    def __init__(self, observer: Observer, group: str, what: str, result: Any) -> None:
        tensors = list(_tensors_in(result))
        types = "/".join(sorted({str(tensor.dtype).replace("torch.", "") for tensor in tensors}))
        elements = sum(tensor.numel() for tensor in tensors)
        self._observer = observer
        self._activity = what.upper()
        self._row = f"group {group}: {what}" + (f", {elements} x {types}" if tensors else "")
        with _lock:  # Two that are on their way at the same time must not share a row.
            taken = _open.setdefault(self._row, set())
            self._place = min(set(range(len(taken) + 1)) - taken)
            taken.add(self._place)
        self._label = f"{self._row} ({self._place + 1})" if self._place else self._row
        observer.call_made(self._label)

    def __enter__(self) -> None:
        """It is its turn."""
        self._observer.call_started(self._label, self._activity)

    def __exit__(self, *_: Any) -> None:
        """It is done, or has failed."""
        self._observer.call_ended(self._label)
        with _lock:
            _open[self._row].discard(self._place)


def _tensors_in(result: Any) -> List[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result for tensor in _tensors_in(item)]
