"""Names the resource that this process lacks for links, its limit, and how to raise it.

A rank without free descriptors needs some to report that. So a few are kept while there are links, and the
descriptors for more links are checked before these are made.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from typing import List, Optional, Set

from ..errors import RingcommError, StartupError

SPARE = 8
"""Descriptors that are kept: enough to reach a rendezvous."""
_OWN = 16
"""Descriptors that a rank needs for links besides those to its peers: listeners, selectors, wake-ups."""
_PER_PEER = 3
_spare: List[int] = []
_users: Set[int] = set()
_lock = threading.Lock()
_DESCRIPTORS = (
    "a process may have {limit} open files there (`ulimit -n`), and they are used up. Raise that limit "
    "before the start (`ulimit -n 65536`; --ulimit nofile=65536 for a container, LimitNOFILE= for a service) "
    "or use fewer files and process groups at a time: a group takes {per_peer} per other rank and {own} more"
)
_REASONS = {
    errno.ENFILE: "all processes of that host have used up its open files (`sysctl fs.file-max`). Raise that",
    errno.ENOMEM: "its memory is used up ({text}; see `free -m`, `ulimit -v` and a container's --memory). "
    "Use fewer ranks there, or smaller models and batches",
    errno.ENOBUFS: "the memory of its network is used up ({text}; see `sysctl net.core net.ipv4.tcp_mem`)",
    errno.ENOSPC: "no space is left there ({text}; see `df -h /dev/shm /tmp`). Free some, or give a "
    "container more by --shm-size",
    errno.EDQUOT: "the user's disk quota is used up there ({text}; see `quota`)",
}
_THREADS = (
    "no thread can be started there (see `ulimit -u`, and pids.max or --pids-limit of a container). Raise "
    "that limit, or start fewer ranks and threads there"
)


def shortage_text(problem: BaseException) -> str:
    """Return what this process lacks according to an error, and the remedy; "" for other errors."""
    if isinstance(problem, MemoryError):
        return _REASONS[errno.ENOMEM].format(text="MemoryError")
    if isinstance(problem, RuntimeError) and "start new thread" in str(problem):
        return _THREADS
    if not isinstance(problem, OSError):
        return ""
    if problem.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _DESCRIPTORS.format(limit=limit, per_peer=_PER_PEER, own=_OWN)
    text = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return _REASONS.get(problem.errno or 0, "").format(text=text)


def shortage_error(problem: BaseException, rank: Optional[int], host: str) -> Optional[StartupError]:
    """Return the error of all ranks if a rank cannot connect because it lacks something; None otherwise."""
    lacking = "" if isinstance(problem, RingcommError) else shortage_text(problem)
    who = f"A rank on {host}" if rank is None else f"Rank {rank} on {host}"
    return StartupError(f"{who} cannot connect to the others: {lacking}.") if lacking else None


def check_descriptors(peers: int, more: int = 0) -> None:
    """Raise OSError, and close the kept descriptors to report it with, if there are not enough for links to
    this many peers, and ``more``; see :func:`keep_spare`.
    """
    with _lock:
        try:
            _close(_open(_OWN + _PER_PEER * peers + more))
        except OSError:
            release_spare()
            raise


def release_spare() -> None:
    """Close the kept descriptors."""
    _close(_spare)


def keep_spare(user: object) -> None:
    """Keep some descriptors, if there are enough, until :func:`drop_spare` of the last user."""
    with _lock:
        _users.add(id(user))
        if not _spare:
            try:
                _spare.extend(_open(SPARE))
            except OSError:
                pass  # the next links will be too many


def drop_spare(user: object) -> None:
    """Note that a user, which has links, needs no descriptors any more."""
    with _lock:
        _users.discard(id(user))
        if not _users:
            release_spare()


def _open(count: int) -> List[int]:
    found: List[int] = []
    try:
        while len(found) < count:
            found.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        _close(found)
        raise
    return found


def _close(descriptors: List[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
