"""Connect the ranks of a process group, and find the other processes of a job of ``ringrun``.

Rank 0 of the group serves a rendezvous and publishes its address. In a job of ``ringrun`` it posts the
address at the job's rendezvous, which only the job's ranks can use. Otherwise it writes a signed entry to the
store of ``init_process_group``; the store itself is not trusted.

PyTorch requires a store, so rank 0 of a job of ``ringrun`` serves one on one address, and sends that address
to the other ranks: over the job's own links, or through the job's rendezvous if there are no links. Groups do
not connect through that store, so a process that reaches it can end the job, but neither join nor change it.

In an encrypted job of ``ringrun`` the launcher's rendezvous keeps the store (:class:`JobStore`) and connects
the groups: nothing is open or in clear, and ranks whose machines cannot be dialled take part.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import socket
import threading
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from ... import api
from ...clock import Deadline
from ...config import (
    Membership,
    Settings,
    host_from_environment,
    key_from_environment,
    launchers_rank_from_environment,
    torchrun_from_environment,
)
from ...configuration.membership import is_loopback, numeric
from ...errors import ConfigError, RingcommError, StartTimeoutError, StartupError, describe_error
from ...job.context import Context
from ...rendezvous.client import Joined, Moved, Watched, await_entry, change_entry, join, post
from ...rendezvous.embedded import EmbeddedRendezvous
from ...storage.files import open_standard_descriptors
from ...transport.connect import check_descriptors, shortage_error
from ...transport.nics import machine
from ...wire.auth import Signer

logger = logging.getLogger("ringcomm.torch")

SCHEME = "ringcomm"
_TIMEOUT = timedelta(minutes=30)  # PyTorch's default
_SILENCE_S = 600.0  # time limit of operations if the user sets none
_STOP_THREAD_NAME = "ringcomm-stop"
_ENTRY = "ringcomm/rendezvous"
_LIMIT = "the timeout= of init_process_group or new_group"  # that counts, and not --start-timeout
_SERVES = 8  # descriptors of a rendezvous beside one for each rank
# The store that the job itself has made, if any, the job and its epoch: groups connect at its rendezvous.
_job_stores: List[Tuple[Any, Membership, int]] = []
_connections: Counter[str] = Counter()  # connections of this process, by the title of the group
_stores = itertools.count()
_last_view: Optional[weakref.ref[Context]] = None

Found = Tuple[Any, int, int]  # a store, a rank, and the number of ranks
Notice = Dict[str, Any]  # a group's ``job``, ``endpoints``, ``machine``, and ``key`` if none is configured


class GroupRendezvous(NamedTuple):
    """A group whose ranks are connected."""

    joined: Joined
    embedded: Optional[EmbeddedRendezvous]  # on the rank that serves the rendezvous
    server: Optional[int] = 0  # that rank; None: the launcher serves it

    def end(self, wait: bool = False, failed: bool = False) -> None:
        """Stop the rendezvous, where it is served, when all ranks have left: in a thread, unless ``wait``."""
        if self.embedded is None:
            return
        if wait:
            self.embedded.stop(failed)
        else:
            threading.Thread(target=self.embedded.stop, args=(failed,), name=_STOP_THREAD_NAME).start()


def group_settings(timeout: timedelta) -> Settings:
    timeout_s = timeout.total_seconds()
    silence_s = _SILENCE_S if timeout == _TIMEOUT else timeout_s
    return replace(Settings.from_environment(), timeout_s=silence_s, start_timeout_s=max(timeout_s, 1.0))


def _job_of(store: Any) -> Optional[Tuple[Membership, int]]:
    """Return the job that made this store for its ranks, and its epoch; None for any other store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return next(((membership, epoch) for own, membership, epoch in _job_stores if own is store), None)


class JobEntry:
    """A group's entry at the job's rendezvous; the methods are those of :class:`StoreEntry`."""

    watched = None  # every connection has its own entry, so rank 0 never replaces it

    def __init__(self, membership: Membership, title: str, epoch: int) -> None:
        self._membership = membership
        title = f"epoch {epoch}, {title}" if membership.elastic else title
        # All members of a view live as long as the view, so their counts are equal.
        self._entry = f"{title}, turn {_connections[title]}"
        _connections[title] += 1

    def within_job(self, rank: int, size: int, host: str) -> Membership:
        """Return a rank's membership in the group as a job that the launcher's rendezvous connects."""
        job = self._membership.job
        return replace(
            self._membership, size=size, rank=rank, host=host, job=f"{job}, {self._entry}", within=job,
            slot=None, member=None, elastic=False,
        )  # fmt: skip

    def write(self, text: str, settings: Settings) -> None:
        post(self._membership, self._entry, text, settings.start_timeout_s)

    def read(self, settings: Settings) -> str:
        return await_entry(self._membership, self._entry, settings.start_timeout_s)


class StoreEntry:
    """A group's entry in PyTorch's store, which processes outside of the job may read and change. ``key``
    signs it, if there is one; for ``grace_s`` ranks look for a newer entry while its address does not answer.
    """

    def __init__(self, store: Any, title: str, key: bytes, grace_s: float) -> None:
        self._grace_s = grace_s
        self._hint = (
            f" The address is that of the entry {_ENTRY} in PyTorch's store, which may be left from an "
            "earlier start: does rank 0 of this start run, and with the same store?"
        )
        self._store = store
        self._title = title
        self._signer = Signer(key, "process groups of torch.distributed") if key else None
        self._current = b""

    @property
    def watched(self) -> Watched:  # made here: kept, it would keep this object, and the store's port, alive
        return Watched(self._moved, self._grace_s, self._hint)

    def write(self, text: str, settings: Settings) -> None:
        signature = "" if self._signer is None else self._signer.sign(text.encode(), self._title).hex()
        self._store.set(_ENTRY, json.dumps({"text": text, "signature": signature}))

    def read(self, settings: Settings) -> str:
        """Wait for the entry; StartupError if there is none in time, or rank 0 has not signed it."""
        try:
            self._store.wait([_ENTRY], timedelta(seconds=settings.start_timeout_s))
        except RuntimeError as problem:
            raise StartupError(
                f"Rank 0 of this group has not opened its rendezvous within {settings.start_timeout_s:g} s: "
                + str(problem).partition("\n")[0]
            ) from None
        self._current = bytes(self._store.get(_ENTRY))
        text = self._text_of(self._current)
        if text is None:
            raise StartupError(
                f"The entry of PyTorch's store of {self._title} ({_ENTRY}) is not signed "
                "with this job's key. Another process has written it, or rank 0 has another key file."
            )
        return text

    def _moved(self) -> bool:
        """Return whether rank 0 has replaced the entry since: then the entry was an earlier group's."""
        latest = bytes(self._store.get(_ENTRY))
        return latest != self._current and self._text_of(latest) is not None

    def _text_of(self, data: bytes) -> Optional[str]:
        """Return the text that rank 0 has signed; None if the signature is not valid."""
        try:
            found = json.loads(data)
            text, signature = str(found["text"]), bytes.fromhex(found["signature"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        valid = self._signer is None or self._signer.verifies(text.encode(), signature, self._title)
        return text if valid else None


Entry = Union[JobEntry, StoreEntry]


def meet(store: Any, rank: int, ranks: Sequence[int], name: str, settings: Settings) -> GroupRendezvous:
    """Connect to the other ranks of a group, of whose ``ranks`` in the job this process's is at ``rank``."""
    open_standard_descriptors()
    secret = key_from_environment()
    title = f"process group {name} of ranks {', '.join(map(str, ranks))}"
    job = _job_of(store)
    grace_s = min(settings.start_timeout_s, Settings.from_environment().start_timeout_s)
    entry: Entry = StoreEntry(store, title, b"" if secret is None else secret[0], grace_s)
    if job is not None:
        entry = JobEntry(job[0], title, job[1])
        if _is_kept_by_launcher(job[0]):
            membership = entry.within_job(rank, len(ranks), _host_name(rank, ranks))
            return GroupRendezvous(join(membership, settings), None, None)
    if secret is None and settings.encrypt:
        missing = ConfigError(
            "RINGCOMM_ENCRYPT=1 needs a key file with a certificate: PyTorch's store, over which the ranks "
            "would agree on a key, is open to every process that can reach it. Make a file with `python -m "
            "ringcomm.newkey --encrypt FILE`, copy it to every host and set RINGCOMM_KEY_FILE; or use "
            "`ringrun --encrypt`."
        )
        if rank == 0:
            _report(entry, missing, settings)
        raise missing
    if rank == 0:
        embedded, notice = _serve(entry, len(ranks), name, secret, settings)
        try:
            return GroupRendezvous(join(_membership(notice, 0, ranks, secret), settings), embedded)
        except BaseException as problem:
            # The rendezvous reports its own errors. After another one, ranks that come would dial it in vain.
            if isinstance(problem, Exception) and not isinstance(problem, RingcommError):
                _report(entry, problem, settings)
            embedded.stop()
            raise
    with suppress(OSError):  # join() reports it, at the address that the entry has
        check_descriptors(len(ranks) - 1)
    deadline = Deadline(settings.start_timeout_s)
    while True:
        left = replace(settings, start_timeout_s=max(1.0, deadline.remaining_s()))
        membership = _membership(_notice_of(entry.read(left), title), rank, ranks, secret)
        try:
            return GroupRendezvous(join(membership, left, watched=entry.watched), None)
        except Moved:
            continue  # The entry was of a group that has ended.


def _report(entry: Entry, problem: Exception, settings: Settings) -> None:
    """Publish why rank 0 has no rendezvous, perhaps because of a setting: others must not wait in vain."""
    text = str(problem) if isinstance(problem, RingcommError) else describe_error(problem)
    try:
        entry.write(json.dumps({"problem": text}), settings)
    except Exception as second:  # noqa: BLE001 - the first problem is raised, which is the cause
        logger.warning("the other ranks of the group cannot be told of it (%s): %s", second, text)


def _membership(
    notice: Notice, rank: int, ranks: Sequence[int], secret: Optional[Tuple[bytes, str]]
) -> Membership:
    key, certificate = secret if secret is not None else (bytes.fromhex(notice["key"]), "")
    return Membership(
        size=len(ranks),
        rendezvous=tuple((str(address), int(port)) for address, port in notice["endpoints"]),
        rendezvous_machine=str(notice["machine"]),
        key=key,
        job=str(notice["job"]),
        rank=rank,
        host=_host_name(rank, ranks),
        certificate=certificate,
    )


def _host_name(rank: int, ranks: Sequence[int]) -> str:
    """Return the name of a rank's host in messages of its group."""
    host = host_from_environment() or socket.gethostname()
    return host if ranks[rank] == rank else f"{host}, rank {ranks[rank]} of all"


def _serve(
    entry: Entry, size: int, name: str, secret: Optional[Tuple[bytes, str]], settings: Settings
) -> Tuple[EmbeddedRendezvous, Notice]:
    """Start the rendezvous and publish its address, or the error."""
    job = f"torch-{name}-{secrets.token_hex(8)}"
    notice: Notice = {"job": job, "machine": machine()}
    if secret is None:
        _warn_of_open_store()
        secret = secrets.token_bytes(32), ""
        notice["key"] = secret[0].hex()
    key, certificate = secret
    one_host, master = torchrun_from_environment(size)
    preferred = ["127.0.0.1"] if one_host else _numeric(master)
    try:
        check_descriptors(size - 1, more=size + _SERVES)
        embedded, notice["endpoints"] = EmbeddedRendezvous.serve(
            key, certificate, job, size, settings, preferred, limit=_LIMIT
        )
    except Exception as problem:
        shortage = shortage_error(problem, 0, host_from_environment() or socket.gethostname())
        _report(entry, shortage or problem, settings)
        if shortage is not None:
            raise shortage from problem
        raise
    try:
        entry.write(json.dumps(notice), settings)
    except BaseException:
        embedded.stop()
        raise
    return embedded, notice


def _numeric(host: str) -> List[str]:
    """Return a host's addresses except the loopback; none if the name does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(item[4][0]) for item in found)
    return [item for item in addresses if not is_loopback(item)]


@lru_cache(maxsize=None)  # once
def _warn_of_open_store() -> None:
    logger.warning(
        "no key was given (RINGCOMM_KEY_FILE, or ringrun), so one was agreed upon over PyTorch's store: any "
        "process that can read or write the store can join this job and change its data."
    )


def _notice_of(text: str, title: str) -> Notice:
    try:
        notice: Notice = json.loads(text)
        if "problem" in notice:
            raise StartupError(f"Rank 0 of {title} could not open its rendezvous: {notice['problem']}")
        bytes.fromhex(notice.get("key", ""))
        endpoints = [(str(address), int(port)) for address, port in notice["endpoints"]]
        if endpoints and notice["job"] and "machine" in notice:
            return notice
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise StartupError(f"The entry of {title} has not been written by ringcomm: {text[:200]!r}")


# ---- how init_process_group finds the other processes of a job of ringrun ---------------------------------


def ringcomm_rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[Found]:
    """Yield a store, this process's rank, and the number of ranks, for ``ringcomm://``."""
    context = _view()
    if context.size == 1:
        yield dist.HashStore(), 0, 1
        return
    store: Any = None
    where: Any = ("", 0)
    membership = context.joined_as or Membership.from_environment()
    if _is_kept_by_launcher(membership):
        name = str(context.broadcast_object(secrets.token_hex(8)))
        yield JobStore(membership, name, timeout, context.generation), context.rank, context.size
        return
    if context.rank == 0:
        store, where = _serve_store(_own_address(context), context.size, timeout)
    where = context.broadcast_object(where)
    if store is None:
        ends = context.group.addresses(0)
        store = _reach_store(where, "localhost" if ends is None else ends[1], context.size, timeout)
    _job_stores[:] = [(store, membership, context.generation)]
    yield store, context.rank, context.size


def _view() -> Context:
    """Return the job of the default group. In an elastic job a second group begins a new view: a program that
    makes another one has lost a rank, or goes on with other ranks; all ranks of the job do that together.
    """
    global _last_view
    api.init()
    if api.context().is_elastic and _last_view is not None and _last_view() is api.context():
        api.restart()
    _last_view = weakref.ref(api.context())
    return api.context()


def _launchers_rendezvous(membership: Membership, rank: int, timeout: timedelta) -> Found:
    """Return a store for the ranks of a job of ``ringrun``, found at the job's rendezvous."""
    one_host, master = torchrun_from_environment(membership.size)
    entry = f"store of torch.distributed, turn {next(_stores)}"
    if _is_kept_by_launcher(membership):
        return JobStore(membership, entry, timeout), rank, membership.size
    if rank == 0:
        address = "127.0.0.1" if one_host else master if numeric(master) else ""
        store, where = _serve_store(address, membership.size, timeout)
        post(membership, entry, json.dumps(where), timeout.total_seconds())
    else:
        where = json.loads(await_entry(membership, entry, timeout.total_seconds()))
        store = _reach_store(where, master, membership.size, timeout)
    _job_stores[:] = [(store, membership, 0)]
    return store, rank, membership.size


def _is_kept_by_launcher(membership: Membership) -> bool:
    """Return whether the store and the rendezvous of groups are the launcher's: in encrypted jobs."""
    return bool(membership.certificate) and membership.slot is not None


class JobStore(dist.Store):
    """PyTorch's store in an encrypted job: the launcher's rendezvous keeps it, for the job's ranks only. Each
    request has a connection of its own, as they are few.
    """

    def __init__(self, membership: Membership, name: str, timeout: timedelta, epoch: int = 0) -> None:
        super().__init__()
        self._membership, self._name, self._timeout = membership, name, timeout
        _job_stores[:] = [(self, membership, epoch)]  # also because PyTorch's wrappers do not keep it

    def _change(self, how: str, key: str, text: str = "", before: str = "") -> str:
        limit_s = self._timeout.total_seconds()
        return change_entry(self._membership, how, f"{self._name}/{key}", limit_s, text, before)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: Any) -> None:
        post(self._membership, f"{self._name}/{key}", _as_text(value), self._timeout.total_seconds())

    def get(self, key: str) -> bytes:
        return self._awaited(key, self._timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: Optional[timedelta] = None) -> None:
        deadline = Deadline((timeout or self._timeout).total_seconds())
        for key in keys:
            self._awaited(key, max(0.1, deadline.remaining_s()))

    def _awaited(self, key: str, limit_s: float) -> bytes:
        try:
            return await_entry(self._membership, f"{self._name}/{key}", limit_s).encode("latin-1")
        except StartTimeoutError:
            raise RuntimeError(f"wait timeout after {limit_s * 1e3:.0f}ms, keys: {key}") from None

    def add(self, key: str, amount: int) -> int:
        return int(self._change("add", key, str(amount)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._change("compare", key, _as_text(desired), _as_text(expected)).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._change("check", key) for key in keys)

    def delete_key(self, key: str) -> bool:
        return bool(self._change("delete", key))

    def num_keys(self) -> int:
        return int(self._change("count", ""))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  as PyTorch calls them through a PrefixStore


def _as_text(value: Any) -> str:
    """Return a value of a store, which is bytes, as a text of as many characters."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _serve_store(address: str, size: int, timeout: timedelta) -> Tuple[Any, Tuple[str, int]]:
    """Return a store that listens on one address, and its endpoint; on all, and "", if that fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        if address:
            listener = socket.create_server((address, 0), family=family)
            port, number = int(listener.getsockname()[1]), listener.detach()
            more = {"wait_for_workers": False, "master_listen_fd": number}
            return dist.TCPStore(address, port, size, True, timeout, **more), (address, port)
    store = dist.TCPStore("localhost", 0, size, True, timeout, wait_for_workers=False)
    return store, ("", int(store.port))


def _reach_store(where: Tuple[str, int], otherwise: str, size: int, timeout: timedelta) -> Any:
    return dist.TCPStore(where[0] or otherwise, where[1], size, False, timeout, wait_for_workers=False)


def _own_address(context: Context) -> str:
    """Return on rank 0 the address that the other ranks' links use; "" if they use several."""
    links = [context.group.addresses(peer) for peer in range(1, context.size)]
    across = {ends[0] for ends in links if ends is not None} or {"127.0.0.1"}
    only = across.pop()
    return "" if across or "%" in only else only


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
