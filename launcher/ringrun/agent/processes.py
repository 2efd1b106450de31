# ruff: noqa: PTH112, PTH208
"""Processes of a job on one host: bind their lifetime to their parent's, find all of them, end them.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, and uses it itself for
the processes on its own machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, NoReturn, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


EARLY = bytearray(getattr(sys, "ringrun_early", b""))
"""Bytes from stdin that came before the agent's program; see :mod:`ringrun.reach.protocol`."""


def load_libc() -> Any:
    """Return the C library for calls that Python lacks, or None where ctypes cannot find it."""
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):
        return None


def prctl(libc: Any, option: int, value: int) -> None:
    """Call Linux's prctl; no effect on other systems."""
    if libc is not None and hasattr(libc, "prctl"):
        libc.prctl(option, value, 0, 0, 0)


def in_native_encoding(text: str) -> str:
    """Return the text whose bytes in this process's encoding equal the launcher's variable in UTF-8."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def read_exactly(count: int) -> bytes:
    """Read this many bytes from stdin, blocking. At its end (the launcher is lost) the process exits."""
    data = bytearray(EARLY[:count])
    del EARLY[:count]
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


class Child:
    """A process that the agent started: a rank or the check; `pipes` are the descriptors of its output."""

    def __init__(self, rank: int, process: Any, pipes: List[int]) -> None:
        self.rank = rank
        self.process = process
        self.pipes = pipes
        self.sent = 0  # the last signal sent to it
        self.end: Dict[str, Any] = {}  # how it has ended, while the rest of its process group runs


class InheritedBytes:
    """Bytes that children read from an inherited descriptor: in memory or a pipe, never in a file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fd = -1
        if hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # an old kernel, or a sandbox
                os.listdir("/proc/self/fd")  # by which the child processes open it
                self.fd = os.memfd_create("ringrun")
        view = memoryview(data) if self.fd >= 0 else memoryview(b"")
        while view:
            view = view[os.write(self.fd, view) :]

    def descriptor(self) -> int:
        """Return a new descriptor for one child, at the start of the bytes; the caller closes it."""
        if self.fd >= 0:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)
        reader, writer = os.pipe()
        if len(self.data) <= 4096:
            os.write(writer, self.data)
        elif os.fork() == 0:  # more than a pipe holds: a child process writes, until the reader ends
            try:
                os.close(reader)
                view = memoryview(self.data)
                while view:
                    view = view[os.write(writer, view) :]
            finally:
                os._exit(0)
        os.close(writer)
        return reader


def strays(job: str, host_index: int, root: int = 0) -> List[int]:
    """Return the sorted ids of a job's running processes on this host, except for this one (Linux; none
    elsewhere). They have the job's identifier in their environment, or descend from the process `root` (0:
    none).
    """
    required = {b"RINGCOMM_JOB=" + job.encode(), b"RINGCOMM_SLOT=%d:" % host_index}
    parents: Dict[int, int] = {}
    found: Set[int] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
            state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
            if state in b"ZX":
                continue
            parents[int(name)] = int(parent)
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        # Only the host's part of RINGCOMM_SLOT=1:0 is compared.
        if required <= {
            item.partition(b":")[0] + b":" if item[:14] == b"RINGCOMM_SLOT=" else item for item in environ
        }:
            found.add(int(name))
    for pid in parents:
        above, steps = parents[pid], 0
        while root and above not in (0, 1, root) and steps < len(parents):
            above, steps = parents.get(above, 0), steps + 1
        if root and above == root:
            found.add(pid)
    return sorted(found - {os.getpid()})


def kill(pids: List[int], signum: int) -> None:
    """Signal processes; processes that have ended are skipped."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


def kill_group(pgid: int, signum: int) -> bool:
    """Signal a process group; return whether it had a process."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def sweep(job: str, host_index: int, root: int = 0, limit_s: float = 1.0) -> None:
    """SIGKILL all processes of :func:`strays` until none is left, or for `limit_s` seconds."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        left = strays(job, host_index, root)
        if not left:
            return
        kill(left, signal.SIGKILL)
        time.sleep(0.01)


def run_guard(child: int, job: str, host_index: int) -> NoReturn:
    """Run the agent's parent: forward signals, wait for the agent, end the remaining processes, exit."""
    forward: Callable[..., None] = lambda signum, _: kill([child], signum)  # noqa: E731
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, forward)
    _, status = os.waitpid(child, 0)
    sweep(job, host_index, os.getpid())
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
