"""Process groups in the timeline: each kind of collective is a row, from the call to its end.

All groups of a process write to one timeline: the job's if this process is in a job of ringcomm, otherwise
the default group's.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Dict, Optional, Set

from ... import api
from ...engine.observer import EventSource, Observer
from ._staged import tensors_in

_default_source: Optional[weakref.ref[EventSource]] = None
_lock = threading.Lock()
_open: Dict[str, Set[int]] = {}


def write_here(source: EventSource) -> None:
    """Report collectives to the observer of this failure detector, unless the process is in a job."""
    global _default_source
    _default_source = weakref.ref(source)


def observer() -> Optional[Observer]:
    """Return the observer of this process's collectives, if there is one."""
    if api.is_initialized():
        return api.context().engine.observer
    source = _default_source() if _default_source is not None else None
    return None if source is None else source.observer


class Traced:
    """A context manager that records a collective's execution in the timeline.

    ``result`` is a tensor, or (nested) lists of tensors.
    """

    def __init__(self, observer: Observer, group: str, what: str, result: Any) -> None:
        tensors = tensors_in(result)
        types = "/".join(sorted({str(tensor.dtype).replace("torch.", "") for tensor in tensors}))
        elements = sum(tensor.numel() for tensor in tensors)
        self._observer = observer
        self._activity = what.upper()
        self._row = f"group {group}: {what}" + (f", {elements} x {types}" if tensors else "")
        with _lock:  # Two simultaneous collectives must not share a row.
            taken = _open.setdefault(self._row, set())
            self._place = min(set(range(len(taken) + 1)) - taken)
            taken.add(self._place)
        self._label = f"{self._row} ({self._place + 1})" if self._place else self._row
        observer.call_made(self._label)

    def __enter__(self) -> None:
        """Record the start."""
        self._observer.call_started(self._label, self._activity)

    def __exit__(self, *_: Any) -> None:
        """Record the end, also of a failure."""
        self._observer.call_ended(self._label)
        with _lock:
            _open[self._row].discard(self._place)
