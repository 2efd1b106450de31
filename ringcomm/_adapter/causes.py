"""Errors raised in graph callbacks: frameworks keep only their text, in another error."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import Any, Deque, Iterator, Optional, Tuple

from .. import api
from ..errors import HostsUpdatedInterrupt, RingcommError

_KEPT = 32

_lock = threading.Lock()
# Errors, each with a reference to the context in which it was raised.
_recorded: Deque[Tuple[Any, RingcommError]] = deque(maxlen=_KEPT)


def record_cause(error: RingcommError) -> None:
    """Remember an error that a callback is about to raise; any thread may call it."""
    job = weakref.ref(api.context()) if api.is_initialized() else _no_job
    with _lock:
        _recorded.append((job, error))


def cause_of(error: BaseException) -> Optional[RingcommError]:
    """Return the recorded error of a callback whose text a framework's error contains, or None.

    Only errors of the present context are considered: an error that quotes an earlier context's has been
    handled. If several texts are contained, the longest is chosen.
    """
    text = str(error)
    job = api.context() if api.is_initialized() else None
    with _lock:
        recorded = list(_recorded)
    found = [item for made_in, item in recorded if made_in() is job and str(item) and str(item) in text]
    return max(found, key=lambda item: len(str(item)), default=None)


@contextmanager
def with_causes() -> Iterator[None]:
    """Replace a framework's error about a failed collective by that collective's error, in the block."""
    try:
        yield
    except (RingcommError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        cause = cause_of(error)
        if cause is None:
            raise
        raise cause from error


def _no_job() -> None:
    return None
