# ruff: noqa: PTH112, PTH118, PTH208  no pathlib in the agent
"""Processes of a job on one host: find and end all of them, and share the host's cores among the ranks.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, and uses it itself for
the processes on its own machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, NoReturn, Optional, Set, Tuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
AUTO, NONE = "auto", "none"
OPENMP = "OMP_NUM_THREADS"
FOLLOW_OPENMP = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Libraries read these first, and ``OMP_NUM_THREADS`` where they are not set."""
OTHERS = (
    "VECLIB_MAXIMUM_THREADS",  # NumPy on macOS
    "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS",
    "PJRT_NPROC", "NPROC",  # JAX; older versions read only the second
)  # fmt: skip


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
    """Return the ids of a job's processes on this host but this one (Linux; none elsewhere). They have the
    job's identifier in their environment, or descend from the process `root` (0: none).
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


# -- threads of each rank's libraries -----------------------------------------------------------


def limit_threads(
    env: Dict[str, str], wanted: str, ranks: int, cores: Optional[float] = None
) -> Dict[str, Any]:
    """Add the variables for `wanted` threads per rank (AUTO: an equal share of the cores of several ranks)
    to the ranks' environment. Return ``threads`` (0: nothing was set), ``kept`` (those with other values).
    """
    cores = available_cores() if cores is None else cores
    if wanted == NONE or (wanted == AUTO and ranks < 2):
        return {"threads": 0, "cores": cores, "ranks": ranks, "kept": {}}
    threads = max(1, int(cores / ranks)) if wanted == AUTO else int(wanted)
    names = [OPENMP, *OTHERS] if env.get(OPENMP) else [OPENMP, *FOLLOW_OPENMP, *OTHERS]
    known = {name: env[name] for name in [OPENMP, *FOLLOW_OPENMP, *OTHERS] if env.get(name)}
    missing = [name for name in names if name not in known]
    env.update(dict.fromkeys(missing, str(threads)))
    kept = {name: value for name, value in known.items() if value != str(threads)}
    return {"threads": threads if missing else 0, "cores": cores, "ranks": ranks, "kept": kept}


def available_cores() -> float:
    """Return the number of cores that this process may use, by its affinity and the limits of its cgroups."""
    cores = float(bound_cores())
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            limits = quotas(file.read().splitlines())
    except OSError:  # not Linux, or without cgroups
        limits = []
    return min([cores, *limits])


def bound_cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    try:
        return len(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux
        return os.cpu_count() or 1


def quotas(lines: Iterable[str], root: str = "/sys/fs/cgroup") -> List[float]:
    """Return the limits, in cores, of the cgroups in ``/proc/self/cgroup`` and of their parents."""
    folders: List[str] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            folders += _with_parents(root, path)
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                folders += _with_parents(os.path.join(root, mount), path)
    found: List[Optional[float]] = []
    for folder in folders:
        old = [word for end in ("quota", "period") for word in _words(f"{folder}/cpu.cfs_{end}_us")]
        found += [_quota(_words(f"{folder}/cpu.max")), _quota(old)]
    return [quota for quota in found if quota is not None]


def _with_parents(root: str, path: str) -> List[str]:
    """Return the folders of a cgroup and its parents. In a container only the outermost may exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [os.path.join(root, *parts[:count]) for count in range(len(parts), -1, -1)]


def _words(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().split()
    except OSError:  # no limit is set here, or no such cgroup is visible from here
        return []


def _quota(words: List[str]) -> Optional[float]:
    """Return the cores of "200000 100000" (microseconds per period); None without a limit ("max", or -1)."""
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def describe_threads(hosts: Mapping[str, Mapping[str, Any]], wanted: str) -> str:
    """Return one line for the user about the limits of :func:`limit_threads` by host, or ""."""
    parts = []
    for host, found in hosts.items():
        kept = "".join(f", {name}={value} is kept" for name, value in sorted(found["kept"].items()))
        if found["threads"] and (kept or wanted == AUTO):
            cores = f"{found['cores']:.3g} core{'' if found['cores'] == 1 else 's'}"
            ranks = f"{found['ranks']} rank{'' if found['ranks'] == 1 else 's'}"
            threads = f"{found['threads']} thread{'' if found['threads'] == 1 else 's'} per rank"
            parts.append(f"{threads} on {host} ({cores}, {ranks}{kept})")
    if not parts:
        return ""
    return f"{'; '.join(parts)}. --threads N sets another number, --threads none leaves it to the libraries."


# -- --bind -----------------------------------------------------------------------------------


class Processor(NamedTuple):
    """One logical processor, by the system's number."""

    number: int
    core: int  # processors of one core share its arithmetic units
    socket: int  # the chip
    capacity: int  # speed relative to the fastest core, up to 1024


def shares(policy: str, processors: List[Processor], ranks: int) -> List[Set[int]]:
    """Return the processors of each rank: equally many, equally fast; empty for ``none`` or too few cores."""
    if policy == NONE or not processors:
        return [set() for _ in range(ranks)]
    cores: Dict[Tuple[int, int], List[Processor]] = {}
    for item in processors:
        cores.setdefault((item.socket, item.core), []).append(item)
    if ranks > len(cores):
        return [set() for _ in range(ranks)]
    count = len(cores) // ranks
    # Equal capacities keep neighbours together, which share caches. Unequal cores are assigned one by one.
    order = sorted(cores.values(), key=lambda core: (-core[0].capacity, core[0].socket, core[0].core))
    if len({core[0].capacity for core in order}) == 1:
        picked = [order[rank * count : (rank + 1) * count] for rank in range(ranks)]
    else:
        picked = [order[rank : count * ranks : ranks] for rank in range(ranks)]
    return [{item.number for core in mine for item in core} for mine in picked]


def usable_shares(policy: str, ranks: int) -> Tuple[List[Set[int]], str]:
    """Return :func:`shares` for this host, and why ranks are not bound as the policy demands, or ""."""
    processors = available_processors()
    found = shares(policy, processors, ranks)
    why = ""
    if policy != NONE and not processors:
        why = "the system does not report the processors of a process"
    elif policy != NONE and not any(found):
        why = f"there are fewer cores than its {ranks} ranks"
    elif policy != NONE:
        try:
            os.sched_setaffinity(0, [item.number for item in processors])  # type: ignore[attr-defined,unused-ignore]
        except AttributeError:
            why = "this system has no sched_setaffinity"
        except OSError as problem:
            why = f"sched_setaffinity: {problem.strerror}"
    return ([set() for _ in range(ranks)] if why else found), why


def available_processors(root: str = "/sys/devices/system/cpu") -> List[Processor]:
    """Return the processors that this process may use; empty where the system does not report them."""
    try:
        numbers = sorted(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return []
    return [
        Processor(
            number,
            _number(f"{root}/cpu{number}/topology/core_id", number),
            _number(f"{root}/cpu{number}/topology/physical_package_id", 0),
            _number(f"{root}/cpu{number}/cpu_capacity", 1024),
        )
        for number in numbers
    ]


def _number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
