"""Run ranks as threads of this process: over memory, or over real sockets and a real rendezvous."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import replace
from typing import Any, Callable, List, Optional, Sequence

from ..clock import Deadline
from ..config import Membership, Settings, Slot
from ..engine.stacks import set_owner
from ..errors import RingcommError
from ..group.group import Peer
from ..job.context import Context
from ..rendezvous.membership import Notice, Seat
from ..rendezvous.server import RendezvousServer
from ..storage.keys import make_certificate
from ..transport.base import Channels, Fabric
from ..transport.memory import memory_channels
from ..transport.reactor import encryption_of

RankFunction = Callable[[Context], Any]


class RankFailed(AssertionError):
    """Ranks raised errors that the test did not expect.

    Attributes:
        errors: one per rank; None for ranks that returned.
    """

    def __init__(self, errors: Sequence[Optional[BaseException]]) -> None:
        lines = [f"rank {rank}: {error!r}" for rank, error in enumerate(errors) if error is not None]
        super().__init__("\n".join(lines))
        self.errors = list(errors)


def run_ranks(
    size: int,
    function: RankFunction,
    transport: str = "memory",
    settings: Optional[Settings] = None,
    timeout_s: float = 60.0,
    wrap: Optional[Callable[[Fabric], Fabric]] = None,
    ranks_per_host: int = 1,
) -> List[Any]:
    """Call ``function(context)`` on every rank, each in a thread; return the results in rank order.

    Args:
        transport: ``memory`` for pipes within this process. ``tcp``, ``unix``, ``shm`` or ``auto`` for real
            sockets on this machine and a real rendezvous.
        settings: the settings of the job. None: the defaults without polling, because the threads share one
            interpreter. With ``encrypt``, the job gets a certificate.
        timeout_s: time limit for all ranks together.
        wrap: for ``memory``: function that wraps every rank's fabric (its links), for example to make it
            faulty.
        ranks_per_host: for ``memory``: number of ranks that count as ranks of one host.

    Raises:
        RankFailed: a rank raised an error. ``__cause__`` is the first error.
        TimeoutError: a rank did not end in time. Its thread continues.
    """
    settings = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0) if settings is None else settings
    if transport == "memory":
        jobs = memory_channels(size)
        if wrap is not None:
            jobs = [Channels(*(wrap(fabric) for fabric in channels)) for channels in jobs]
        places = [divmod(rank, ranks_per_host) for rank in range(size)]
        peers = [
            Peer(rank, f"host{host}", host, local, os.getpid()) for rank, (host, local) in enumerate(places)
        ]
        starters = [_starter(channels, peers, settings) for channels in jobs]
        return _run_threads(starters, function, timeout_s)
    settings = replace(settings, transport=transport)
    key = secrets.token_bytes(32)
    certificate = make_certificate() if settings.encrypt else ""
    notices: List[Notice] = []
    server = RendezvousServer(
        key=key,
        job="test",
        seats=[Seat(Slot(0, rank), "localhost") for rank in range(size)],
        addresses=["127.0.0.1"],
        start_timeout_s=settings.start_timeout_s,
        notify=notices.append,
        encryption=encryption_of(certificate),
    )
    endpoints = tuple(server.start())
    try:
        memberships = [
            Membership(size, endpoints, key, "test", Slot(0, rank), None, "localhost", certificate)
            for rank in range(size)
        ]
        return _run_threads([_joiner(item, settings) for item in memberships], function, timeout_s)
    finally:
        server.stop()


def _starter(channels: Channels, peers: Sequence[Peer], settings: Settings) -> Callable[[], Context]:
    return lambda: Context(channels, peers, settings)


def _joiner(membership: Membership, settings: Settings) -> Callable[[], Context]:
    return lambda: Context.start(membership, settings)


def _run_threads(
    starters: Sequence[Callable[[], Context]], function: RankFunction, timeout_s: float
) -> List[Any]:
    results: List[Any] = [None] * len(starters)
    errors: List[Optional[BaseException]] = [None] * len(starters)
    order: List[BaseException] = []
    owners = [object() for _ in starters]

    def work(rank: int) -> None:
        set_owner(threading.current_thread(), owners[rank])
        try:
            with starters[rank]() as context:
                results[rank] = function(context)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again in the caller's thread
            errors[rank] = error
            order.append(error)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(len(starters))
    ]
    no_rank = object()
    for thread in threading.enumerate():
        set_owner(thread, no_rank)  # the caller's threads are not ranks
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout_s)
    for thread in threads:
        thread.join(deadline.remaining_s())
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        raise TimeoutError(f"ranks {stuck} did not end within {timeout_s:g} s; errors of others: {errors}")
    if order:
        raise RankFailed(errors) from order[0]
    return results


def errors_of(size: int, function: RankFunction, **options: Any) -> List[RingcommError]:
    """Like :func:`run_ranks`, but every rank must raise an error; return the errors in rank order."""
    try:
        results = run_ranks(size, function, **options)
    except RankFailed as failure:
        missing = [rank for rank, error in enumerate(failure.errors) if not isinstance(error, RingcommError)]
        if missing:
            raise AssertionError(f"ranks {missing} raised no RingcommError: {failure}") from failure
        return [error for error in failure.errors if isinstance(error, RingcommError)]
    raise AssertionError(f"no rank raised; they returned {results!r}")
