"""What the lab needs from the machine: commands, leases, the root's `docker0`, and process lists.

Everything here is Linux and root only. Nothing here depends on how a lab is put together; see netlab.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import psutil

RUN_DIR = Path("/run/ringcomm-netlab")
DOCKER_ADDRESS = "172.17.0.1/16"
DOCKER_ALIAS = "ringcomm-netlab decoy"
TOOLS = ("ip", "tc", "nft", "nsenter", "unshare", "setpriv", "mount", "sshd", "ssh", "ssh-keygen")
LAST_LAB = 254
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

# Some of the tools live in sbin, which an ordinary PATH may lack.
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

# Every kernel feature that a lab needs, tried in a namespace that ends with the command.
TRIAL = """
set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link add trial0 type bridge
ip link add trial1 type veth peer name trial2
ip link set trial1 master trial0
tc qdisc add dev trial2 root tbf rate 20mbit burst 64kb latency 50ms
nft add table inet trial
"""


class LabError(RuntimeError):
    """A command that the lab needs has failed, or a host did not come up."""


def tool_env(env: Dict[str, str] | None = None) -> Dict[str, str]:
    """The environment `env` (default: this process's own) with a PATH on which the tools are found."""
    return {**(os.environ if env is None else env), "PATH": TOOL_PATH}


def sh(*argv: str, stdin: str = "", check: bool = True) -> str:
    """Run a command and return its stdout; LabError with its stderr when it fails and `check` is set."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, env=tool_env())
    if check and done.returncode:
        what = f"`{' '.join(argv)}` failed ({done.returncode})"
        raise LabError(f"{what}: {done.stderr.strip()}\n{stdin}".rstrip())
    return done.stdout


def ip(netns: str | None, *args: str, check: bool = True) -> str:
    return sh("ip", *(["-n", netns] if netns else []), *args, check=check)


def ip_batch(netns: str | None, lines: List[str]) -> None:
    sh("ip", *(["-n", netns] if netns else []), "-batch", "-", stdin="\n".join(lines) + "\n")


def ip_json(netns: str | None, *args: str) -> List[Dict[str, Any]]:
    return list(json.loads(ip(netns, "-j", *args) or "[]"))


def interruptible() -> None:
    """For `preexec_fn`: SIGINT and SIGQUIT work, though a shell's background job ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll a condition until it holds; LabError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)


def in_netns(netns: str, *argv: str, stdin: str = "") -> str:
    return sh("nsenter", f"--net=/run/netns/{netns}", *argv, stdin=stdin)


def unavailable() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in TOOLS if not shutil.which(name, path=TOOL_PATH)]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables, openssh-server, util-linux)"
    try:
        sh("unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount", "sh", "-c", TRIAL)
    except (LabError, OSError, subprocess.TimeoutExpired) as error:
        return "a trial namespace failed: " + " ".join(str(error).split("failed", 1)[-1].split())[:300]
    return None


# --- leases: lab N belongs to the process that holds the lock on N.lock; the kernel drops it on death ---


def lock(path: Path, mode: int) -> int | None:
    """Open and flock a file without waiting: the descriptor, or None when another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:  # else unlinked between our open and our lock
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def networks(number: int) -> Dict[str, Tuple[str, str]]:
    first = {"eth": 99, "wlan": 98}
    return {role: (f"10.{n}.{number}.0/24", f"fd{n}:{number}::/64") for role, n in first.items()}


def taken_networks() -> List[Any]:
    """Networks that the root namespace has routes for; those as wide as 10.0.0.0/8 don't count."""
    routes = ip_json(None, "route", "show", "table", "all") + ip_json(None, "-6", "route", "show")
    found = []
    for route in routes:
        with contextlib.suppress(ValueError):  # "default"
            network = ipaddress.ip_network(route.get("dst", ""), strict=False)
            if network.prefixlen > 8:
                found.append(network)
    return found


def acquire() -> Tuple[int, int]:
    RUN_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken = taken_networks()
    for offset in range(LAST_LAB):  # each process from another number on, so that few are used anew at once
        number = 1 + (os.getpid() + offset) % LAST_LAB
        mine = [ipaddress.ip_network(net) for pair in networks(number).values() for net in pair]
        if any(a.version == b.version and a.overlaps(b) for a in mine for b in taken):
            continue
        fd = lock(RUN_DIR / f"{number}.lock", fcntl.LOCK_EX)
        if fd is not None:
            remove(number)  # a dead process may have left something that has no route
            return number, fd
    raise LabError("no free lab number: every 10.99.N.0/24 is in use")


def release(number: int, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        (RUN_DIR / f"{number}.lock").unlink()
    unlock(fd)


def remove(number: int) -> None:
    """Remove everything that belongs to lab `number`; its lock must be held. What is gone already is fine."""
    for name in netns_of(number):
        for pid in sh("ip", "netns", "pids", name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for link in ip_json(None, "link", "show"):
        if re.fullmatch(rf"rl{number}[a-z]m?", link["ifname"]):
            ip(None, "link", "del", link["ifname"], check=False)
    for net4, net6 in networks(number).values():
        ip(None, "route", "del", "unreachable", net4, "metric", "4000", check=False)
        ip(None, "-6", "route", "del", "unreachable", net6, "metric", "4000", check=False)
    for name in netns_of(number):
        sh("ip", "netns", "del", name)
    shutil.rmtree(RUN_DIR / str(number), ignore_errors=True)


def netns_of(number: int) -> List[str]:
    directory = Path("/run/netns")
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    return [name for name in names if re.match(rf"rl{number}[-.]", name)]


def cleanup_stale() -> List[int]:
    """Remove what labs of dead processes have left; returns their numbers."""
    removed = []
    for path in sorted(RUN_DIR.glob("[0-9]*.lock")):
        fd = lock(path, fcntl.LOCK_EX)
        if fd is not None:
            removed.append(int(path.stem))
            remove(removed[-1])
            release(removed[-1], fd)
    drop_docker()
    return removed


# --- the decoy docker0 of the root: made when there is none, shared by the labs, removed with the last ---


@contextlib.contextmanager
def docker_mutex() -> Iterator[Path]:
    """Keep other labs out while docker0 is made or dropped; gives the file that its users lock (shared)."""
    RUN_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(RUN_DIR / "docker0.mutex", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield RUN_DIR / "docker0.users"
    finally:
        unlock(fd)


def docker_alias() -> str | None:
    """Return what the root's `docker0` says of itself; "" when it is not ours, None when there is none."""
    links = {link["ifname"]: str(link.get("ifalias", "")) for link in ip_json(None, "link", "show")}
    return links.get("docker0")


def hold_docker() -> int | None:
    """Make `docker0` in the root when it has none: a lock that keeps it, or None when it is not ours."""
    decoy = ipaddress.ip_network(DOCKER_ADDRESS, strict=False)
    with docker_mutex() as users:
        alias = docker_alias()
        if alias is None:
            if any(net.version == 4 and net.overlaps(decoy) for net in taken_networks()):
                return None
            ip(None, "link", "add", "docker0", "type", "bridge")
            ip(None, "link", "set", "docker0", "alias", DOCKER_ALIAS, "up")
            ip(None, "addr", "add", DOCKER_ADDRESS, "dev", "docker0")
        elif alias != DOCKER_ALIAS:
            return None
        return lock(users, fcntl.LOCK_SH)


def drop_docker() -> None:
    """Remove the root's `docker0` if it is ours and no lab holds it any more."""
    with docker_mutex() as users:
        fd = lock(users, fcntl.LOCK_EX)
        if fd is not None:
            if docker_alias() == DOCKER_ALIAS:
                ip(None, "link", "del", "docker0", check=False)
            unlock(fd)


# --- processes ---


def pid_namespace(pid: int) -> int:
    """The inode that identifies a process's pid namespace; 0 when it is gone."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def alive_in(namespace: int) -> List[Tuple[int, str]]:
    """(pid as seen here, command line) of the processes in a pid namespace, without zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if pid_namespace(process.pid) == namespace and process.status() not in ENDED:
                found.append((process.pid, " ".join(process.cmdline()).strip()))
    return sorted(found)


def listening(pid: int, port: int) -> int:
    """Return how many TCP sockets listen on `port` in the network namespace of process `pid`."""
    count = 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                count += fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    return count
