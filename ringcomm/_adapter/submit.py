"""Start collectives on operands, name them, wait for several, and find the causes of frameworks' errors."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Deque, Iterator, List, Optional, Sequence, Tuple

from .. import api
from ..arrays.operands import Operand, mirrors
from ..calls.async_calls import deliverer, finisher
from ..calls.process_set import ProcessSet, number_of
from ..collective.options import Options
from ..engine.request import Handle
from ..errors import HostsUpdatedInterrupt, RingcommError

Operands = Sequence[Operand]


def start_allreduce(
    operands: Operands, options: Options, urgent: bool, grouped: bool,
    convert: Optional[Callable[[Any], Any]] = None, **more: Any,
) -> Handle:  # fmt: skip
    """Start a reduction; a list as result if ``grouped``. ``more`` is for ``Engine.allreduce``."""
    return api.context().engine.allreduce(
        [item.flat for item in operands], options, wire_name("allreduce", options.name),
        [item.shape for item in operands], number_of(options.process_set), urgent,
        convert or finisher(operands, grouped), mirrors=mirrors(operands), **more,
    )  # fmt: skip


def finish_earlier(kind: str, name: Optional[str], process_set: Optional[ProcessSet]) -> None:
    """Wait for a reduction of gradients that the program has left unfinished: its name is free then."""
    if name:
        api.context().engine.finish_earlier(wire_name(kind, name), number_of(process_set))


def start_broadcast(
    operands: Operands,
    root_rank: int,
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    grouped: bool = False,
) -> Handle:
    """Start copying the root's elements to all ranks; a list as result if ``grouped``."""
    return api.context().engine.broadcast(
        [item.flat for item in operands], root_rank, wire_name("broadcast", name),
        [item.shape for item in operands], number_of(process_set), urgent, finisher(operands, grouped),
        mirrors=mirrors(operands),
    )  # fmt: skip


def start_reducescatter(operands: Operands, options: Options, urgent: bool, grouped: bool) -> Handle:
    """Start a reduction of which every rank gets its rows; a list as result if ``grouped``."""
    return api.context().engine.reducescatter(
        [item.flat for item in operands], [item.shape for item in operands],
        options._replace(name=wire_name("reducescatter", options.name)), number_of(options.process_set),
        urgent, deliverer(operands, grouped), mirrors=mirrors(operands),
    )  # fmt: skip


def start_allgather(
    operands: Operands, name: Optional[str], process_set: ProcessSet, urgent: bool, grouped: bool
) -> Handle:
    """Start gathering the rows of all ranks; a list as result if ``grouped``."""
    return api.context().engine.allgather(
        [item.flat for item in operands], [item.shape for item in operands], wire_name("allgather", name),
        number_of(process_set), urgent, deliverer(operands, grouped), mirrors=mirrors(operands),
    )  # fmt: skip


def start_alltoall(
    operand: Operand,
    splits: Optional[Sequence[int]],
    name: Optional[str],
    process_set: ProcessSet,
    urgent: bool,
    counted: Callable[[Any], Any],
) -> Handle:
    """Start exchanging rows; the result is the rows, and what ``counted`` makes of their number by rank."""
    return api.context().engine.alltoall(
        operand.flat, operand.shape, splits, wire_name("alltoall", name), number_of(process_set), urgent,
        lambda result: (operand.deliver(result[0]), counted(result[1])), mirrors=mirrors([operand]),
    )  # fmt: skip


class SequenceName(str):
    """The common name of operations that run one after another, in the same order on all ranks.

    All kinds share it, so that ranks get an error if the kinds of their next operations differ. Unlike
    operations without a name, they may run beside others that have none.
    """


def wire_name(kind: str, name: Optional[str]) -> str:
    """Return the name by which ranks match an operation: its kind and the caller's name.

    Without the caller's name it is empty: operations are matched by their order.
    """
    if isinstance(name, SequenceName):
        return str(name)
    return f"{kind}.{name}" if name else ""


def run_all(steps: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call every function, each of which waits for an operation, also when an earlier one has failed.

    None of the operations of one call may still write to a tensor when the error reaches the program. Return
    the results in order. The first RingcommError is raised after all calls; any other exception (Ctrl-C, for
    example) passes at once.
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
