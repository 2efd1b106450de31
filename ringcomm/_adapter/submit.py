"""Start adapters' collectives, wait for several, send objects, and find the causes of frameworks' errors."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Deque, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls import async_calls
from ..calls.async_calls import wire_name
from ..calls.objects import NOTHING
from ..calls.process_set import ProcessSet, number_of
from ..docstrings import documented
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
    write to a tensor when the first error reaches the program.
    """
    results: List[Any] = []
    problem: Optional[Exception] = None
    for step in steps:
        try:
            results.append(step())
        except Exception as error:  # noqa: BLE001 - raised below
            problem = problem or error
    if problem is not None:
        raise problem
    return results


# ---- objects -----------------------------------------------------------------------------------------------


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
    length = np.array([payload.size], np.int64)
    handle = engine.allgather([length, payload], [(1,), payload.shape], label, number, urgent=True)
    lengths, gathered = handle.wait()
    packed.raise_error()
    stops = np.cumsum(lengths)
    return [
        objects.unpack(gathered[int(stop - length) : int(stop)], rank, "allgather_object", matched)
        for rank, length, stop in zip(engine.sets.members(number), lengths, stops)
    ]


# ---- errors raised in graph callbacks: frameworks keep only their text, in another error ------------------

_KEPT = 32

_lock = threading.Lock()
# Errors, each with a reference to the context in which it was raised.
_recorded: Deque[Tuple[Any, RingcommError]] = deque(maxlen=_KEPT)


def record_cause(error: RingcommError) -> None:
    """Remember an error that a callback is about to raise; any thread may call it."""
    job: Callable[[], Any] = weakref.ref(api.context()) if api.is_initialized() else lambda: None
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
