"""The module-level functions: a convenience over one default :class:`~ringcomm.context.Context`."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, List, Optional, Sequence

from .config import Membership, Settings
from .context import Context
from .dtypes import Array
from .errors import NotInitializedError, RingcommError, describe_error
from .ops import ReduceOp

_lock = threading.Lock()
_default: Optional[Context] = None
_registered = False
_left = False


def init(membership: Optional[Membership] = None, settings: Optional[Settings] = None) -> None:
    """Join the job: find the other ranks and link up with them. A second call does nothing.

    Without a launcher and without ``RINGCOMM_SIZE`` in the environment the job is this one process,
    and no socket is opened.

    Raises:
        ConfigError: a variable or an argument makes no sense.
        StartupError: (or one of its kinds) the job could not be put together.
    """
    global _default, _registered
    with _lock:
        if _default is None:
            try:
                _default = Context.start(membership, settings)
            except RingcommError as error:
                # The message says it all; where inside ringcomm it was composed helps nobody.
                raise error.with_traceback(None) from None
        if not _registered:
            atexit.register(_leave_at_exit)
            _registered = True


def shutdown() -> None:
    """Leave the job. Harmless if it was left already; happens by itself when the program ends."""
    global _default, _left
    with _lock:
        context, _default = _default, None
        _left = _left or context is not None
    if context is not None:
        context.close()


def _leave_at_exit() -> None:
    """Leave, and say why if an uncaught exception ends the program, so that all others can name it."""
    global _default
    context, _default = _default, None
    if context is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not sys.flags.interactive and not hasattr(sys, "ps1"):
        context.close(f"uncaught {describe_error(error)}", ok=False)
    else:
        context.close("its program ended")


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _default is not None


def context() -> Context:
    """The default context.

    Raises:
        NotInitializedError: ``init()`` has not been called, or ``shutdown()`` has.
    """
    if _default is None and _left:
        raise NotInitializedError(
            "This rank has left the job: ringcomm.shutdown() was called. To join again, call "
            "ringcomm.init() first."
        )
    if _default is None:
        raise NotInitializedError(
            "ringcomm has not been initialized; call ringcomm.init() first (and start the program with "
            "ringrun for more than one rank)."
        )
    return _default


def rank() -> int:
    """This process's number, from 0 to ``size() - 1``."""
    return context().rank


def size() -> int:
    """How many processes the job has."""
    return context().size


def start_timeline(path: str, mark_cycles: bool = False) -> None:
    """See :meth:`ringcomm.Context.start_timeline`."""
    context().start_timeline(path, mark_cycles)


def stop_timeline() -> None:
    """See :meth:`ringcomm.Context.stop_timeline`."""
    context().stop_timeline()


def local_rank() -> int:
    """This process's number among those on the same host."""
    return context().local_rank


def local_size() -> int:
    """How many processes of the job run on this host."""
    return context().local_size


def cross_rank() -> int:
    """This host's number among those that have a rank with the same local rank."""
    return context().cross_rank


def cross_size() -> int:
    """How many hosts have a rank with this local rank."""
    return context().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of ranks."""
    return context().is_homogeneous


def allreduce(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """See :meth:`ringcomm.context.Context.allreduce`."""
    return context().allreduce(array, op, name, prescale_factor, postscale_factor)


def allreduce_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """See :meth:`ringcomm.context.Context.allreduce_`."""
    return context().allreduce_(array, op, name, prescale_factor, postscale_factor)


def reducescatter(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """See :meth:`ringcomm.context.Context.reducescatter`."""
    return context().reducescatter(array, op, name, prescale_factor, postscale_factor)


def reducescatter_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """See :meth:`ringcomm.context.Context.reducescatter_`."""
    return context().reducescatter_(array, op, name, prescale_factor, postscale_factor)


def allgather(array: Any, name: Optional[str] = None) -> Array:
    """See :meth:`ringcomm.context.Context.allgather`."""
    return context().allgather(array, name)


def allgather_(array: Array, name: Optional[str] = None) -> Array:
    """See :meth:`ringcomm.context.Context.allgather_`."""
    return context().allgather_(array, name)


def broadcast(array: Any, root_rank: int = 0, name: Optional[str] = None) -> Array:
    """See :meth:`ringcomm.context.Context.broadcast`."""
    return context().broadcast(array, root_rank, name)


def broadcast_(array: Array, root_rank: int = 0, name: Optional[str] = None) -> Array:
    """See :meth:`ringcomm.context.Context.broadcast_`."""
    return context().broadcast_(array, root_rank, name)


def alltoall(array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None) -> Any:
    """See :meth:`ringcomm.context.Context.alltoall`."""
    return context().alltoall(array, splits, name)


def alltoall_(array: Array, name: Optional[str] = None) -> Array:
    """See :meth:`ringcomm.context.Context.alltoall_`."""
    return context().alltoall_(array, name)


def barrier(name: Optional[str] = None) -> None:
    """See :meth:`ringcomm.context.Context.barrier`."""
    context().barrier(name)


def broadcast_object(value: Any = None, root_rank: int = 0, name: Optional[str] = None) -> Any:
    """See :meth:`ringcomm.context.Context.broadcast_object`."""
    return context().broadcast_object(value, root_rank, name)


def allgather_object(value: Any, name: Optional[str] = None) -> List[Any]:
    """See :meth:`ringcomm.context.Context.allgather_object`."""
    return context().allgather_object(value, name)


def run(
    fn: Any, args: Sequence[Any] = (), kwargs: Optional[dict[str, Any]] = None, **options: Any
) -> List[Any]:
    """Run a function on several ranks and return their results, in rank order.

    Works from scripts and notebooks. The function is shipped with cloudpickle; in it, call
    ``ringcomm.init()`` and use the collectives. Options are those of ``ringrun --help``: ``np``,
    ``hosts``, ``hostfile``, ``env`` (a dictionary), ``python``, ``cwd`` and ``iface`` (for all hosts, or a
    dictionary by host), ``start_timeout_s``, ``timeout_s``, ``ssh``, ``ssh_port``, ``ssh_identity_file``,
    ``output_dir``, ``verbose``, and ``console``, which takes what ranks print. See
    :func:`ringrun.function.run_function`.
    """
    from ringrun.function import run_function

    results: List[Any] = run_function(fn, args, kwargs or {}, **options)
    return results
