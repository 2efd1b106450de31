"""How ``init_process_group`` finds the other processes when ``ringrun`` has started them.

PyTorch requires a store, so rank 0 serves one on one address, and sends that address to the other ranks: over
the job's own links, or through the job's rendezvous if there are no links. Groups do not connect through that
store (:mod:`._store`), so a process that reaches it can end the job, but neither join nor change it.
"""

from __future__ import annotations

import json
import logging
import socket
import weakref
from datetime import timedelta
from importlib import import_module
from typing import Any, Callable, Iterator, Optional, Tuple
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from ... import api
from ...config import Membership, launchers_rank_from_environment, torchrun_from_environment
from ...configuration.endpoints import numeric
from ...job.context import Context
from ...rendezvous.connect_server import await_entry, post
from ._store import adopt

logger = logging.getLogger("ringcomm.torch")

SCHEME = "ringcomm"
_stores_made = 0
_last_view: Optional[weakref.ref[Context]] = None
_TIMEOUT = timedelta(minutes=30)
Found = Tuple[Any, int, int]


def ringcomm_rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[Found]:
    """Yield a store, this process's rank, and the number of ranks, for ``ringcomm://``."""
    context = _view()
    if context.size == 1:
        yield dist.HashStore(), 0, 1
        return
    store: Any = None
    where = "", 0
    if context.rank == 0:
        store, where = _serve_store(_own_address(context), context.size, timeout)
    where = context.broadcast_object(where)
    if store is None:
        store = _reach_store(where, _address_of_rank_0(context), context.size, timeout)
    adopt(store, context.joined_as or Membership.from_environment(), context.generation)
    yield store, context.rank, context.size


def _view() -> Context:
    """Return the job of the default group. In an elastic job a second group begins a new view.

    A program that has destroyed its process group and makes another one has lost a rank, or goes on with
    other ranks; all ranks of the job do that together.
    """
    global _last_view
    api.init()
    if api.context().is_elastic and _last_view is not None and _last_view() is api.context():
        api.restart()
    _last_view = weakref.ref(api.context())
    return api.context()


def _launchers_rendezvous(membership: Membership, rank: int, timeout: timedelta) -> Found:
    """Return a store for the ranks of a job of ``ringrun``, found at the job's rendezvous."""
    global _stores_made
    one_host, master = torchrun_from_environment(membership.size)
    entry = f"store of torch.distributed, turn {_stores_made}"
    _stores_made += 1
    if rank == 0:
        address = "127.0.0.1" if one_host else master if numeric(master) else ""
        store, where = _serve_store(address, membership.size, timeout)
        post(membership, entry, json.dumps(where), timeout.total_seconds())
    else:
        where = json.loads(await_entry(membership, entry, timeout.total_seconds()))
        store = _reach_store(where, master, membership.size, timeout)
    adopt(store, membership)
    return store, rank, membership.size


def _serve_store(address: str, size: int, timeout: timedelta) -> Tuple[Any, Tuple[str, int]]:
    """Return a store that listens on one address, and its endpoint; on all, and "", if that fails."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family) if address else None
    except OSError as problem:
        logger.debug("the store cannot listen on %s: %s", address, problem)
        listener = None
    if listener is None:
        store = dist.TCPStore("localhost", 0, size, True, timeout, wait_for_workers=False)
        return store, ("", int(store.port))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, (address, port)


def _reach_store(where: Tuple[str, int], otherwise: str, size: int, timeout: timedelta) -> Any:
    return dist.TCPStore(where[0] or otherwise, where[1], size, False, timeout, wait_for_workers=False)


def _own_address(context: Context) -> str:
    """Return on rank 0 the address that the other ranks' links use; "" if they use several."""
    links = [context.group.addresses(peer) for peer in range(1, context.size)]
    across = {ends[0] for ends in links if ends is not None}
    addresses = {item for item in across if "%" not in item}
    if len(addresses) < len(across):
        return ""
    return addresses.pop() if len(addresses) == 1 else "" if addresses else "127.0.0.1"


def _address_of_rank_0(context: Context) -> str:
    """Return the address of rank 0 in this rank's own link."""
    ends = context.group.addresses(0)
    return "localhost" if ends is None else ends[1]


def register() -> None:
    """Register ``ringcomm://`` with PyTorch, and as a fallback of ``env://`` in jobs of ``ringrun``."""
    dist.register_rendezvous_handler(SCHEME, ringcomm_rendezvous)
    # PyTorch has no public function to extend a scheme. init_method="ringcomm://" works without it.
    handlers: Any = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = _with_fallback(handlers["env"])


def _sets_no_others(url: str, rank: int, size: int) -> bool:
    """Return whether a program gives PyTorch no rank and size, or those that the launcher has given it."""
    given = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    same = given.pop("rank", str(rank)) == str(rank) and given.pop("world_size", str(size)) == str(size)
    return same and not given


def _with_fallback(usual: Callable[..., Iterator[Found]]) -> Callable[..., Iterator[Found]]:
    def env_rendezvous(url: str, timeout: timedelta = _TIMEOUT, **rest: Any) -> Iterator[Found]:
        rank = launchers_rank_from_environment()
        if rank is not None:
            membership = Membership.from_environment()
            if _sets_no_others(url, rank, membership.size):
                yield _launchers_rendezvous(membership, rank, timeout)
                return
        found = usual(url, timeout=timeout, **rest)
        try:
            first = next(found)
        except ValueError:
            # RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not set. In a job of ringcomm that is allowed.
            if Membership.from_environment().is_alone:
                raise
            found = ringcomm_rendezvous(url, timeout)
            first = next(found)
        yield first
        yield from found

    return env_rendezvous
