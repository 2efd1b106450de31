"""The module-level functions: they call the methods of one default :class:`~ringcomm.context.Context`."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from .config import Membership, Settings
from .context import Context
from .docstrings import documented
from .dtypes import Array
from .errors import NotInitializedError, RingcommError, describe_error
from .ops import ReduceOp

_lock = threading.Lock()
_default: Optional[Context] = None
_registered = False
_left = False
_after_restart: List[Callable[[], None]] = []
_before_leaving: List[Callable[[], None]] = []


def init(membership: Optional[Membership] = None, settings: Optional[Settings] = None) -> None:
    """Join the job: find the other ranks and connect to them. A second call does nothing.

    Without a launcher and without ``RINGCOMM_SIZE`` in the environment the job is this one process,
    and no socket is opened.

    Args:
        membership: the job's size, rendezvous and key; by default from the environment, as ``ringrun``
            sets it.
        settings: tunables; by default from the ``RINGCOMM_*`` variables.

    Raises:
        ConfigError: a variable or an argument has an invalid value.
        StartupError: (or a subclass) the ranks did not connect; the message says which and why.
    """
    global _default, _registered
    with _lock:
        if _default is None:
            try:
                _default = Context.start(membership, settings)
            except RingcommError as error:
                # The message has all facts; a traceback through ringcomm's own code adds none.
                raise error.with_traceback(None) from None
        if not _registered:
            atexit.register(_leave_at_exit)
            _registered = True


def shutdown() -> None:
    """Leave the job and close its connections.

    Does nothing if this process is in no job. It is called automatically when the program ends.
    """
    global _default, _left
    _finish_first()
    with _lock:
        context, _default = _default, None
        _left = _left or context is not None
    if context is not None:
        context.close()


def restart(position: int = 0) -> None:
    """Leave the present view of the job, and join the next one, in the same process.

    In an elastic job the connection to the rendezvous stays open, and every member of the view must call
    this or end; in other jobs it is ``shutdown()`` and ``init()``. ``elastic.run`` calls it.

    Args:
        position: how many commits or steps this process's state contains. Rank 0 of the next view is a
            process with the highest.

    Raises:
        ExcludedError: this process is not to be in the job any more.
        StartupError: (or a subclass) the job cannot go on with this process.
    """
    global _default, _left
    if _default is None or not _default.is_elastic:
        shutdown()
        init()
        return
    with _lock:
        before, _default, _left = _default, None, True
        _default = before.restart(position)
    for callback in _after_restart:
        callback()


def after_restart(callback: Callable[[], None]) -> None:
    """Have a function called after every :func:`restart` of an elastic job.

    Args:
        callback: calls what new processes call after ``init()``, such as the registration of process sets.
    """
    _after_restart.append(callback)


def before_leaving(callback: Callable[[], None]) -> None:
    """Have a function called before this process leaves its job, unless its program has failed.

    Args:
        callback: waits for collectives that a framework executes later than the program calls them.
    """
    _before_leaving.append(callback)


def _finish_first() -> None:
    if _default is not None:
        for callback in _before_leaving:
            callback()


def take_changes() -> int:
    """Which changes of the membership are to take place, since this was last called.

    Returns:
        the sum of 1 (processes are to leave) and 2 (processes are ready to join); 0 if there are none, or
        this process is in no job.
    """
    return 0 if _default is None else _default.take_changes()


def gather_positions(position: int) -> List[int]:
    """Exchange the positions of all ranks' states. All ranks must call it.

    Args:
        position: how many commits or steps this process's state contains.

    Returns:
        those of all ranks, in rank order; of this process alone if it is in no job.

    Raises:
        PeerLostError: a rank was lost.
    """
    if _default is None:
        return [position]
    return [int(item) for item in _default.allgather(np.array([position], np.int64))]


@documented
def epoch() -> int:
    """The number of the present view of an elastic job, or of the present generation of another job.

    Returns:
        0 at first; every later view has a larger number.

    Raises:
        {not_initialized}
    """
    return context().generation


def _leave_at_exit() -> None:
    """Leave the job, and report an uncaught exception, so that the other ranks' errors can name it."""
    global _default
    error = getattr(sys, "last_value", None)
    if error is None:
        _finish_first()
    context, _default = _default, None
    if context is None:
        return
    if error is not None and not sys.flags.interactive and not hasattr(sys, "ps1"):
        context.close(f"uncaught {describe_error(error)}", ok=False)
    else:
        context.close("its program ended")


def leave(error: BaseException) -> None:
    """Leave the job because of an error, which the other ranks' errors name; nothing in no job.

    For processes that outlive the function which failed: in others this happens when the program ends.

    Args:
        error: what the function raised.
    """
    global _default, _left
    with _lock:
        context, _default = _default, None
        _left = _left or context is not None
    if context is not None:
        context.close(f"uncaught {describe_error(error)}", ok=False)


def is_initialized() -> bool:
    """Whether this process is in a job.

    Returns:
        True between ``init()`` and ``shutdown()``.
    """
    return _default is not None


def is_elastic() -> bool:
    """Whether this process is in an elastic job.

    Returns:
        False in other jobs, and in no job.
    """
    return _default is not None and _default.is_elastic


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


@documented
def rank() -> int:
    """This process's rank in the job.

    Returns:
        from 0 to ``size() - 1``.

    Raises:
        {not_initialized}
    """
    return context().rank


@documented
def size() -> int:
    """The number of ranks (processes) in the job.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return context().size


@documented
def start_timeline(path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of collectives (a Chrome trace) until :func:`stop_timeline`.

    Every rank that is to appear in it must call this; rank 0 writes the file.

    Args:
        path: the file, opened by rank 0; open it in ``chrome://tracing`` or Perfetto afterwards.
        mark_cycles: also mark the engine's cycles.

    Raises:
        Misuse: a timeline is already being written.
        ConfigError: the file cannot be written.
        {not_initialized}
    """
    context().start_timeline(path, mark_cycles)


@documented
def stop_timeline() -> None:
    """End the timeline. Every rank that started it must call this; the file is complete afterwards.

    Raises:
        {not_initialized}
    """
    context().stop_timeline()


def stats() -> Dict[str, float]:
    """What this rank has done since :func:`init`, in numbers, as W&B, MLflow and TensorBoard take them.

    A call takes some ten microseconds. No other rank has to do anything for it.

    Returns:
        ``ringcomm/calls``: number of collectives; ``ringcomm/sent_bytes`` and ``ringcomm/received_bytes``;
        ``ringcomm/elapsed_s``: seconds since :func:`init`; ``ringcomm/waited_s``: those spent in collectives,
        moving data or waiting for other ranks; ``ringcomm/steps``, ``ringcomm/step_s`` and
        ``ringcomm/mean_step_s``: number of training steps, seconds of the last one and of one on average.
        For every other rank N that data were exchanged with ``ringcomm/rank_N/sent_bytes``,
        ``.../received_bytes`` and ``.../waited_for_s``: how long this rank slept until that rank's data came.
        For every kind of collective, such as ``allreduce``, ``ringcomm/allreduce/calls``, ``.../s`` and
        ``.../moved_bytes``.

    Raises:
        NotInitializedError: before :func:`init`, or after :func:`shutdown`.

    Example::

        wandb.log({"loss": loss, **rc.stats()})
    """
    return context().stats()


def count_step() -> None:
    """Count a training step of this rank, for :func:`stats`, ``ringrun --watch`` and ``ringrun --report``.

    The optimizers of the adapters count their own steps. Call it once per step in a loop of your own.

    Raises:
        NotInitializedError: before :func:`init`, or after :func:`shutdown`.
    """
    context().activity.steps.add()


@documented
def local_rank() -> int:
    """This process's rank among the job's processes on the same host.

    Returns:
        from 0 to ``local_size() - 1``; usually the number of the device to use.

    Raises:
        {not_initialized}
    """
    return context().local_rank


@documented
def local_size() -> int:
    """The number of the job's processes on this host.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return context().local_size


@documented
def cross_rank() -> int:
    """This host's number among the hosts that have a rank with the same local rank.

    Returns:
        from 0 to ``cross_size() - 1``.

    Raises:
        {not_initialized}
    """
    return context().cross_rank


@documented
def cross_size() -> int:
    """The number of hosts that have a rank with this local rank.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return context().cross_size


@documented
def is_homogeneous() -> bool:
    """Whether every host runs the same number of ranks.

    Returns:
        True or False, the same on all ranks.

    Raises:
        {not_initialized}
    """
    return context().is_homogeneous


@documented
def allreduce(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
    weight: Optional[float] = None,
) -> Array:
    """Reduce an array of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = rc.allreduce(gradient)``, ``total = rc.allreduce([1.0, 2.0], op=rc.Sum)``,
    ``mean = rc.allreduce(gradient, weight=len(batch))``.

    {allreduce}
        {not_initialized}
    """
    return context().allreduce(array, op, name, prescale_factor, postscale_factor, compression, weight)


@documented
def allreduce_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
    weight: Optional[float] = None,
) -> Array:
    """Reduce an array over all ranks in place: the result overwrites ``array`` on every rank.

    {allreduce_}
        {not_initialized}
    """
    return context().allreduce_(array, op, name, prescale_factor, postscale_factor, compression, weight)


@documented
def reducescatter(
    array: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce an array over all ranks; every rank gets only its rows of the result.

    Example: ``rows = rc.reducescatter(np.ones((4, 2)), op=rc.Sum)`` gives 2 rows to each of 2 ranks.

    {reducescatter}
        {not_initialized}
    """
    return context().reducescatter(array, op, name, prescale_factor, postscale_factor)


@documented
def reducescatter_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce an array over all ranks with ``array`` as working space; every rank gets only its rows.

    {reducescatter_}
        {not_initialized}
    """
    return context().reducescatter_(array, op, name, prescale_factor, postscale_factor)


@documented
def allgather(array: Any, name: Optional[str] = None) -> Array:
    """Concatenate every rank's array along the first dimension, in rank order.

    Example: ``losses = rc.allgather(np.array([loss]))`` has one element per rank.

    {allgather}
        {not_initialized}
    """
    return context().allgather(array, name)


@documented
def allgather_(array: Array, name: Optional[str] = None) -> Array:
    """Complete an array of which every rank holds its rows: the inverse of ``reducescatter_``.

    Each rank contributes the rows that ``reducescatter`` would give it; the other rows are overwritten.

    {allgather_}
        {not_initialized}
    """
    return context().allgather_(array, name)


@documented
def broadcast(array: Any, root_rank: int = 0, name: Optional[str] = None) -> Array:
    """Copy the root's array to every rank.

    Example: ``weights = rc.broadcast(weights, root_rank=0)``.

    {broadcast}
        {not_initialized}
    """
    return context().broadcast(array, root_rank, name)


@documented
def broadcast_(array: Array, root_rank: int = 0, name: Optional[str] = None) -> Array:
    """Overwrite ``array`` on every rank with the root's.

    {broadcast_}
        {not_initialized}
    """
    return context().broadcast_(array, root_rank, name)


@documented
def alltoall(array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None) -> Any:
    """Send a part of the rows to every rank, and receive a part of the rows of every rank.

    Example: ``rows, counts = rc.alltoall(rows, splits=[3, 1])`` on 2 ranks.

    {alltoall}
        {not_initialized}
    """
    return context().alltoall(array, splits, name)


@documented
def alltoall_(array: Array, name: Optional[str] = None) -> Array:
    """Exchange rows with every rank in place; every rank gets equally many rows.

    {alltoall_}
        {not_initialized}
    """
    return context().alltoall_(array, name)


@documented
def barrier(name: Optional[str] = None) -> None:
    """Wait until every rank has called it.

    {barrier}
        {not_initialized}
    """
    context().barrier(name)


@documented
def broadcast_object(value: Any = None, root_rank: int = 0, name: Optional[str] = None) -> Any:
    """Send any object (pickled by cloudpickle) from the root to all ranks.

    Example: ``config = rc.broadcast_object(config)``.

    {broadcast_object}
        {not_initialized}
    """
    return context().broadcast_object(value, root_rank, name)


@documented
def allgather_object(value: Any, name: Optional[str] = None) -> List[Any]:
    """Collect any object (pickled by cloudpickle) from every rank.

    Example: ``names = rc.allgather_object(platform.node())``.

    {allgather_object}
        {not_initialized}
    """
    return context().allgather_object(value, name)


def run(
    fn: Any, args: Sequence[Any] = (), kwargs: Optional[dict[str, Any]] = None, **options: Any
) -> List[Any]:
    """Run a function on several ranks and return their results, in rank order.

    Works from scripts and notebooks. The function is sent with cloudpickle; in it, call
    ``ringcomm.init()`` and use the collectives.

    Example: ``rc.run(train, args=(0.1,), np=3, hosts="localhost,jetson1,jetson2")``.

    Args:
        fn: the function that every rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        **options: the options of ``ringrun --help``: ``np`` (number of ranks), ``hosts``, ``hostfile``,
            ``env`` (a dictionary), ``python``, ``cwd`` and ``iface`` (one for all hosts, or a dictionary by
            host), ``start_timeout_s`` and ``timeout_s`` (seconds), ``ssh``, ``ssh_port``,
            ``ssh_identity_file``, ``output_dir``, ``verbose``, ``restarts``, ``config_file``, ``settings`` (a
            dictionary of settings by field name), and ``console`` (takes the ranks' output instead of
            ``sys.stdout`` and ``sys.stderr``); for elastic jobs ``min_np``, ``max_np``,
            ``host_discovery_script``, ``slots_per_host``, ``reset_limit``, ``elastic_timeout_s``,
            ``blacklist_cooldown_range`` and ``drop``.

    Returns:
        the functions' results, in rank order.

    Raises:
        RemoteError: a rank failed, or the job did not start.
        ConfigError: an option has an invalid value.
    """
    from ringrun.function import run_function

    results: List[Any] = run_function(fn, args, kwargs or {}, **options)
    return results
