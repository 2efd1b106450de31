"""Run a function on the workers of a Dask cluster, as the ranks of one job.

::

    import ringcomm.dask
    losses = ringcomm.dask.run(client, train, 0.1, epochs=3)

Each worker must be a separate process, such as those of ``LocalCluster()`` and ``dask worker``. It must be
able to connect to the machine of the client, through which the ranks find each other.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import urlsplit

import distributed

from ._adapter.placed import (
    ARRIVE_S,
    Host,
    PlacedJob,
    RankOutcome,
    Ticket,
    attempt,
    by_host,
    call,
    settings_for,
)
from .calls.objects import unpack
from .errors import ConfigError

__all__ = ["run", "submit"]


def run(
    client: distributed.Client, fn: Callable[..., Any], *args: Any, workers: Optional[Sequence[str]] = None,
    pass_local_rank: bool = False, **kwargs: Any,
) -> List[Any]:  # fmt: skip
    """Call ``fn(*args, **kwargs)`` once on every worker, with a rank of one job in each, and wait for all.

    A second identical call runs the function again. If a worker is lost, you get an error that names it as
    soon as the other ranks notice; this does not wait for Dask.

    Example: ``ringcomm.dask.run(client, train, workers=["tcp://10.0.0.2:40331", "tcp://10.0.0.3:38211"])``.

    Args:
        client: a synchronous client.
        fn: the function. ringcomm calls ``init()`` before it; the function may call it again.
        args: its positional arguments, the same on all ranks. A future is replaced by its result.
        workers: addresses of the workers to use, each for one rank; None: all present workers.
        pass_local_rank: whether the function gets the keyword argument ``local_rank``, too.
        kwargs: its keyword arguments.

    Returns:
        the results of the function on all ranks, in rank order. Ranks are in the order of hosts and
        addresses.

    Raises:
        RemoteError: a rank failed. ``rank`` and ``host`` name it, and ``__cause__`` is its exception.
        ConfigError: there is no worker, a worker is named twice, or the client is asynchronous.
    """
    job, futures = _start(client, _attempt, fn, args, kwargs, workers, pass_local_rank)
    try:
        return job.collect(partial(_poll, {future: rank for rank, future in enumerate(futures)}))
    finally:
        client.cancel(futures)
        job.close()


def submit(
    client: distributed.Client, fn: Callable[..., Any], *args: Any, workers: Optional[Sequence[str]] = None,
    pass_local_rank: bool = False, **kwargs: Any,
) -> List[distributed.Future]:  # fmt: skip
    """Start ``fn(*args, **kwargs)`` as :func:`run` does, and do not wait.

    Args:
        client: a synchronous client. It must exist until the function has returned.
        fn: the function.
        args: its positional arguments.
        workers: addresses of the workers to use; None for all.
        pass_local_rank: whether the function gets the keyword argument ``local_rank``, too.
        kwargs: its keyword arguments.

    Returns:
        a future for each rank, in rank order. If a worker is lost, its own future is cancelled, and the
        futures of the other ranks get an error that names it.

    Raises:
        ConfigError: as for :func:`run`.
    """
    job, futures = _start(client, _call, fn, args, kwargs, workers, pass_local_rank)
    left = set(futures)

    def done(future: distributed.Future) -> None:
        left.discard(future)
        if not left:
            job.close()

    job.when_failed(lambda: _cancel_lost(client, futures))
    for future in futures:
        future.add_done_callback(done)
    return futures


def _start(
    client: distributed.Client, task: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any],
    kwargs: Mapping[str, Any], workers: Optional[Sequence[str]], pass_local_rank: bool,
) -> Tuple[PlacedJob, List[distributed.Future]]:  # fmt: skip
    if client.asynchronous:
        raise ConfigError("An asynchronous client cannot be used here: make one without asynchronous=True.")
    places = _places(client, workers)
    job = PlacedJob("dask", len(places), settings_for(), [_host(address) for address in places])
    try:
        futures = [
            # Pinned, never from the cache, and not again: a rank is one process, once.
            client.submit(
                task, ticket, fn, pass_local_rank, list(args), dict(kwargs), key=f"{job.id}-{ticket.rank}",
                workers=[address], allow_other_workers=False, pure=False, retries=0,
            )
            for ticket, address in zip(job.tickets, places)
        ]  # fmt: skip
    except BaseException:
        job.close()
        raise
    return job, futures


def _places(client: distributed.Client, workers: Optional[Sequence[str]]) -> List[str]:
    """Return the addresses of the workers in rank order; ConfigError if one is unknown or named twice."""
    there = list(client.run_on_scheduler(_addresses))
    chosen = sorted(there) if workers is None else list(workers)
    if not chosen:
        raise ConfigError("There is no worker: the cluster has none yet, or workers=[] was given.")
    unknown = [address for address in chosen if address not in there]
    if unknown:
        raise ConfigError(f"The cluster has no worker {unknown[0]!r}. It has: {', '.join(sorted(there))}.")
    twice = [address for address in chosen if chosen.count(address) > 1]
    if twice:
        raise ConfigError(f"workers: {twice[0]!r} is named twice. A worker can be one rank.")
    return by_host(chosen, lambda address: _host(address).identity)


def _addresses(dask_scheduler: Any) -> List[str]:
    """Return the addresses of all workers, on the scheduler: ``scheduler_info`` has only some."""
    return list(dask_scheduler.workers)


def _host(address: str) -> Host:
    name = urlsplit(address).hostname or address
    return Host(name, name)


def _call(
    ticket: Ticket, fn: Callable[..., Any], pass_local_rank: bool, args: List[Any], kwargs: Dict[str, Any]
) -> Any:
    """Run the task of one rank, on the worker."""
    local = {"local_rank": ticket.local_rank} if pass_local_rank else {}
    return call(ticket, fn, args, {**kwargs, **local})


def _attempt(*arguments: Any) -> bytes:
    """Run the task of one rank; return its result or error as bytes."""
    return attempt(lambda: _call(*arguments))


def _poll(left: Dict[distributed.Future, int], timeout_s: float) -> Iterable[Tuple[int, RankOutcome]]:
    """Return the ranks that ended since the last call; ``left`` keeps the futures of the others."""
    try:
        done = distributed.wait(list(left), timeout=timeout_s, return_when="FIRST_COMPLETED").done
    except (TimeoutError, distributed.TimeoutError):
        return []
    found = []
    for future in done:
        if future.status == "finished":
            outcome = RankOutcome(unpack(future.result()))
        else:
            outcome = RankOutcome.of_error(
                future.exception() or RuntimeError(f"the task was {future.status}")
            )
        found.append((left.pop(future), outcome))
    return found


def _cancel_lost(client: distributed.Client, futures: Sequence[distributed.Future]) -> None:
    """Cancel tasks that never run after a failure: those of a lost worker, under its old address."""
    try:
        distributed.wait(list(futures), timeout=ARRIVE_S)
    except (TimeoutError, distributed.TimeoutError):
        client.cancel([future for future in futures if not future.done()])
