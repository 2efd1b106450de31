"""How ``init_process_group`` finds the other processes when ``ringrun`` has started them.

Over the job's own links rank 0 tells everybody the port of a store, and each rank reaches that store at
the address by which it reaches rank 0 anyway.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib import import_module
from typing import Any, Callable, Iterator, Tuple

import torch.distributed as dist

from ... import api
from ...config import Membership
from ...context import Context

SCHEME = "ringcomm"
_TIMEOUT = timedelta(minutes=30)
Found = Tuple[Any, int, int]


def ringcomm_rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[Found]:
    """The handler of ``ringcomm://``: a store, this process's rank, and the number of ranks."""
    api.init()
    context = api.context()
    if context.size == 1:
        yield dist.HashStore(), 0, 1
        return
    store: Any = None
    port = 0
    if context.rank == 0:
        store = dist.TCPStore("localhost", 0, context.size, True, timeout, wait_for_workers=False)
        port = int(store.port)
    port = context.broadcast_object(port)
    if store is None:
        store = dist.TCPStore(
            _address_of_rank_0(context), port, context.size, False, timeout, wait_for_workers=False
        )
    yield store, context.rank, context.size


def _address_of_rank_0(context: Context) -> str:
    """The address by which this rank's own link reaches rank 0."""
    sock: Any = getattr(context._lanes.calls.link(0), "sock", None)
    if sock is None or sock.family == socket.AF_UNIX:
        return "localhost"
    return str(sock.getpeername()[0])


def register() -> None:
    """Make ``ringcomm://`` known, and let ``env://`` fall back on it in jobs of ``ringrun``."""
    dist.register_rendezvous_handler(SCHEME, ringcomm_rendezvous)
    # There is no public way to add to a scheme. Without it, init_method="ringcomm://" does the same.
    handlers: Any = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _with_fallback(handlers["env"])


def _with_fallback(usual: Callable[..., Iterator[Found]]) -> Callable[..., Iterator[Found]]:
    def env_rendezvous(url: str, timeout: timedelta = _TIMEOUT, **rest: Any) -> Iterator[Found]:
        found = usual(url, timeout=timeout, **rest)
        try:
            first = next(found)
        except ValueError:
            # RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not set. In a job of ringcomm's it need not be.
            if Membership.from_environment().size == 1:
                raise
            found = ringcomm_rendezvous(url, timeout)
            first = next(found)
        yield first
        yield from found

    return env_rendezvous
