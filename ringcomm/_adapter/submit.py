"""Start adapters' collectives, wait for several, and find the causes of frameworks' errors."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Deque, Iterator, List, Optional, Sequence, Tuple

from .. import api
from ..calls import async_calls
from ..calls.async_calls import wire_name
from ..calls.process_set import ProcessSet, number_of
from ..errors import HostsUpdatedInterrupt, RingcommError

# As of :mod:`ringcomm.calls.async_calls`, under names that contain the kind.
start_allreduce = partial(async_calls.start_allreduce, kind="allreduce")
start_reducescatter = partial(async_calls.start_reducescatter, kind="reducescatter")
start_allgather = partial(async_calls.start_allgather, kind="allgather")
start_broadcast = partial(async_calls.start_broadcast, kind="broadcast")
start_alltoall = partial(async_calls.start_alltoall, kind="alltoall")


def finish_earlier(kind: str, name: Optional[str], process_set: Optional[ProcessSet]) -> None:
    """Wait for a reduction of gradients that the program has left unfinished: its name is free then."""
    if name:
        api.context().engine.finish_earlier(wire_name(kind, name), number_of(process_set))


def run_all(steps: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call every function, each of which waits for an operation, also when one has failed: none may still
    write to a tensor when the first RingcommError reaches the program; any other exception passes at once.
    """
    results: List[Any] = []
    problem: Optional[RingcommError] = None
    for step in steps:
        try:
            results.append(step())
        except RingcommError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return results


# ---- errors raised in graph callbacks: frameworks keep only their text, in another error ------------------

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
    """Return the recorded error of the present context whose text a framework's error contains, or None."""
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
