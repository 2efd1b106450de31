"""Errors of callbacks: frameworks pass on their text inside an error of their own, but not the error."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Deque, Optional, Tuple

from .. import api
from ..errors import RingcommError

_KEPT = 32

_lock = threading.Lock()
_recorded: Deque[Tuple[Any, RingcommError]] = deque(maxlen=_KEPT)
"""Each with a reference to the context in which it was raised."""


def record_cause(error: RingcommError) -> None:
    """Remember an error that a callback is about to raise. For any thread."""
    job = weakref.ref(api.context()) if api.is_initialized() else _no_job
    with _lock:
        _recorded.append((job, error))


def cause_of(error: BaseException) -> Optional[RingcommError]:
    """What made a callback fail, if that is what an error of the framework is about.

    Only errors of the present job count: what a program quotes of an earlier one has been dealt with. Of
    several whose text is in the error it is the one with the longest.
    """
    text = str(error)
    job = api.context() if api.is_initialized() else None
    with _lock:
        recorded = list(_recorded)
    found = [item for made_in, item in recorded if made_in() is job and str(item) and str(item) in text]
    return max(found, key=lambda item: len(str(item)), default=None)


def _no_job() -> None:
    return None
