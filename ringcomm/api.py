"""The job of one default :class:`~ringcomm.job.context.Context`, and its collectives of Python objects.

:mod:`ringcomm.job.context` makes this context and ends it; its functions belong to this module, too.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from .docstrings import documented
from .job.context import after_restart as after_restart
from .job.context import before_calls as before_calls
from .job.context import before_leaving as before_leaving
from .job.context import context as context
from .job.context import epoch as epoch
from .job.context import gather_positions as gather_positions
from .job.context import init as init
from .job.context import is_elastic as is_elastic
from .job.context import is_initialized as is_initialized
from .job.context import join_now as join_now
from .job.context import leave as leave
from .job.context import on_changes as on_changes
from .job.context import placed as placed
from .job.context import restart as restart
from .job.context import shutdown as shutdown
from .job.context import take_changes as take_changes


@documented
def rank() -> int:
    """Return this process's rank in the job.

    Returns:
        a number from 0 to ``size() - 1``.

    Raises:
        {not_initialized}
    """
    return placed().rank


@documented
def size() -> int:
    """Return the number of ranks (processes) in the job. PyTorch calls it the world size.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return placed().size


@documented
def start_timeline(path: str) -> None:
    """Write a timeline of collectives (a Chrome trace) until :func:`stop_timeline`.

    Every rank that is to appear in the timeline must call this. Rank 0 writes the file.

    Args:
        path: the file, on rank 0's host. Open it in ``chrome://tracing`` or Perfetto afterwards.

    Raises:
        Misuse: a timeline is already being written.
        ConfigError: the file cannot be written.
        {not_initialized}
    """
    context().start_timeline(path)


@documented
def stop_timeline() -> None:
    """End the timeline. Every rank that started it must call this. Then the file is complete.

    Raises:
        {not_initialized}
    """
    context().stop_timeline()


def stats() -> Dict[str, float]:
    """Return what this rank has done since :func:`init`, as numbers for W&B, MLflow and TensorBoard.

    A call takes about ten microseconds. Other ranks take no part in it.

    Returns:
        a dictionary. ``ringcomm/calls`` is the number of collectives. ``ringcomm/sent_bytes`` and
        ``ringcomm/received_bytes`` count the data. ``ringcomm/elapsed_s`` are the seconds since :func:`init`.
        ``ringcomm/waited_s`` are the seconds in collectives, in which this rank moved data or waited for
        other ranks. ``ringcomm/steps``, ``ringcomm/step_s`` and ``ringcomm/mean_step_s`` are the number of
        training steps, the seconds of the last step, and the seconds of an average step. For every rank N
        with which data were exchanged there are ``ringcomm/rank_N/sent_bytes``, ``.../received_bytes``, and
        ``.../waited_for_s``: the seconds for which this rank slept until the data of rank N arrived. For
        every kind of collective, such as ``allreduce``, there are ``ringcomm/allreduce/calls``, ``.../s``
        (seconds) and ``.../moved_bytes``.

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
    """Return this process's rank among the job's processes on the same host.

    Returns:
        a number from 0 to ``local_size() - 1``; usually the number of the GPU to use.

    Raises:
        {not_initialized}
    """
    return placed().local_rank


@documented
def local_size() -> int:
    """Return the number of the job's processes on this host.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return placed().local_size


@documented
def cross_rank() -> int:
    """Return this host's number among the hosts that have a rank with the same local rank.

    Returns:
        a number from 0 to ``cross_size() - 1``.

    Raises:
        {not_initialized}
    """
    return placed().cross_rank


@documented
def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank.

    Returns:
        at least 1.

    Raises:
        {not_initialized}
    """
    return placed().cross_size


@documented
def is_homogeneous() -> bool:
    """Return whether every host runs the same number of ranks.

    Returns:
        True or False, the same on all ranks.

    Raises:
        {not_initialized}
    """
    return placed().is_homogeneous


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
