"""What hosts get (ringcomm, wheels with ``--provision``, files with ``--ship``), and what they send back."""

from __future__ import annotations

import fnmatch
import os
import threading
import zipfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple
from typing import Counter as Counts

from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.storage.files import PartialFile, write_all
from ringcomm.storage.folders import inner_folder, own_folder

from ..agent import framing
from ..agent.checks import PROVISIONED
from ..plan.job import HostJob, Job
from ..reach.base import quoted
from ..reach.incoming import decoded, fields, flag, maybe, said, text, whole
from ..ship.contents import Package, Target, describe_sent, fetch_wheels, own_package
from .agents import Agents, Loop

MAX_HOST_BYTES = 100 * 10**9
"""Maximum bytes from one host."""
MAX_HOST_FILES = 100_000
MAX_PARTS = 64
"""Maximum components of a path."""
MAX_PROBLEMS = 100
"""Further problems are not reported."""
MIN_FREE_BYTES = 1 << 30
"""Free space that stays in the file system."""
Wanted = Tuple[Target, Tuple[str, ...]]
"""The target of wheels, and the packages."""


class Supply:
    """The packages of one job, and those that each host uses now."""

    def __init__(
        self, agents: Agents, loop: Loop, say: Callable[[str], None], problem: Callable[[HostJob, str], None]
    ) -> None:
        self._agents, self._loop, self._print, self._problem = agents, loop, say, problem
        self._wheels: Dict[int, Package] = {}  # by host: the package that it uses after ringcomm's
        self._waiting: Dict[Wanted, List[HostJob]] = {}  # hosts whose wheels are being downloaded

    def send(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Send a host what its agent's ``lacks`` event names: ``files`` by digest, or else its package."""
        tree = self._agents.job.tree
        if "files" in facts and tree is not None:
            sent = Package("files", tree.contents(facts["files"]))
            counts = len(facts["files"]), len(tree.files), len(sent.archive)
            self._print(describe_sent(host.name, counts, tree.ignored))
            self._agents.links[host.index].send_frame(framing.CODE, sent.archive)
            return
        package = self._wheels.get(host.index) or own_package()
        self._print(f"sending {package.name} to {host.name} ({len(package.archive) / 1e6:.1f} MB)")
        self._agents.links[host.index].send_frame(framing.PACKAGE, package.archive)

    def provision(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Download the wheels of a ``needs`` event in a thread, once for equal hosts, which then use them."""
        version = str(facts["found"].get("version", "")).rpartition(".")[0]
        lacks = facts["found"].get("lacks", PROVISIONED)
        target = Target(version, facts["machine"], facts["glibc"])
        wanted = target, tuple(name for name in PROVISIONED if name in lacks)
        if wanted in self._waiting:
            self._waiting[wanted].append(host)
            return
        self._waiting[wanted] = [host]
        threading.Thread(target=self._download, args=(wanted,), daemon=True).start()

    def _download(self, wanted: Wanted) -> None:
        target, names = wanted
        try:
            found = fetch_wheels(target, names=names)
        except (ConfigError, OSError, zipfile.BadZipFile) as problem:
            text = str(problem)
            self._loop.call(lambda: self._not_downloaded(wanted, text))
        else:
            self._loop.call(lambda: self._downloaded(wanted, *found))

    def _not_downloaded(self, wanted: Wanted, text: str) -> None:
        for host in self._waiting.pop(wanted):
            self._problem(host, f"{host.name}: {text}")

    def _downloaded(self, wanted: Wanted, package: Package, lines: List[str]) -> None:
        hosts = self._waiting.pop(wanted)
        if lines:
            self._print(f"wheels for {', '.join(host.name for host in hosts)}: {'; '.join(lines)}")
        for host in hosts:
            self._wheels[host.index] = package
            self._agents.send(host, {"do": "use", "package": package.digest})


# -- files that come back ---------------------------------------------------------------------


class _Open(NamedTuple):
    """The file that a host is sending."""

    path: PurePosixPath  # within the host's directory
    file: PartialFile  # has no name until it is complete
    bytes: int  # received so far
    folders: ExitStack  # closes the open descriptors


class FetchedFiles:
    """The files of one job, in one directory per host; `folder` is made when the first file arrives.

    A host may be compromised, and other users may have prepared the directory: only requested files are
    written, to new files in directories of this user, and no link is followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Dict[str, _Open] = {}
        self._given_up: Dict[str, PurePosixPath] = {}
        self._files: Counts[str] = Counter()
        self._bytes: Counts[str] = Counter()
        self._problems: List[str] = []

    def take(self, host: str, data: bytes, patterns: Sequence[str]) -> None:
        """Write one piece of a file: a line of JSON (``path``, ``offset``, ``last``, perhaps ``error``), and
        the bytes. ProtocolError if it is malformed, out of order, or matches none of the glob patterns of
        this job.
        """
        line, _, piece = data.partition(b"\n")
        facts = decoded(line, _FACTS)
        path: PurePosixPath = facts["path"]
        if facts["offset"] and self._given_up.get(host) == path:
            return
        if patterns and not _is_safe(path):
            why = f"it has control characters, or more than {MAX_PARTS} components"
            self._give_up(host, path, f"{host}: {quoted(str(path)[:200])} is not taken: {why}")
            return
        if not any(_matches(path.parts, _components(pattern)) for pattern in patterns):
            raise ProtocolError(f"a file {str(path)[:200]!a}, which this job does not fetch")
        if "error" in facts:
            self._give_up(host, path, f"{host}: {quoted(str(path))} could not be read: {facts['error']}")
            return
        try:
            self._write(host, path, facts["offset"], piece, facts.get("last", False))
        except OSError as problem:
            target = self._folder / _name(host) / path
            self._give_up(host, path, f"{target} could not be written: {problem.strerror}")

    def _give_up(self, host: str, path: PurePosixPath, why: str) -> None:
        self._abandon(host)
        self._given_up[host] = path
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(why)

    def _write(self, host: str, path: PurePosixPath, offset: int, piece: bytes, last: bool) -> None:
        if not offset:
            self._abandon(host)
            self._begin(host, path)
        current = self._open.get(host)
        if current is None or (current.path, current.bytes) != (path, offset):
            raise ProtocolError(f"a piece of {str(path)[:200]!a} that does not follow the one before it")
        descriptor = current.file.descriptor
        facts = os.statvfs(descriptor)
        if self._bytes[host] + len(piece) > MAX_HOST_BYTES:
            raise OSError(0, f"{host} has sent {MAX_HOST_BYTES / 1e9:g} GB, and more is not taken")
        if facts.f_bavail * facts.f_frsize < MIN_FREE_BYTES + len(piece):
            raise OSError(0, f"less than {MIN_FREE_BYTES / 1e9:.1f} GB would be left of the file system")
        write_all(descriptor, piece)
        self._bytes[host] += len(piece)
        self._open[host] = current._replace(bytes=offset + len(piece))
        if last:
            current.file.publish()
            os.close(descriptor)
            del self._open[host]
            current.folders.close()
            self._files[host] += 1

    def _begin(self, host: str, path: PurePosixPath) -> None:
        """Open a new file, in directories that no other user can replace."""
        if self._files[host] >= MAX_HOST_FILES:
            raise OSError(0, f"{host} has sent {MAX_HOST_FILES} files, and more are not taken")
        with ExitStack() as stack:
            top = stack.enter_context(own_folder(self._folder))
            folder = stack.enter_context(inner_folder(top, "/".join((_name(host), *path.parts[:-1])), 0o777))
            file = PartialFile(folder, path.name, 0o666)
            self._open[host] = _Open(path, file, 0, stack.pop_all())

    def _abandon(self, host: str) -> None:
        """Remove the incomplete file of a host."""
        current = self._open.pop(host, None)
        if current is not None:
            self._bytes[host] -= current.bytes
            current.file.abandon()
            current.folders.close()

    def describe(self, job: Job) -> str:
        """Return lines about the files fetched from each host, and problems. Call at the end of the job."""
        for host, current in list(self._open.items()):
            self._give_up(host, current.path, f"{host}: {current.path} did not arrive completely")
        lines = []
        for name in [host.name for host in job.last_hosts if host.gets_code]:
            count, size = self._files[name], self._bytes[name]
            if count:
                text = f"fetched {count} file{'' if count == 1 else 's'}, {size / 1e6:.1f} MB, from {name}"
                lines.append(f"{text} into {self._folder / _name(name)}")
            else:
                lines.append(f"{name} sent no file that matches {' or '.join(job.fetch)}")
        return "\n".join([*lines, *self._problems])


def _name(host: str) -> str:
    """Return the directory name of a host."""
    return host.replace("/", "_")


def _components(pattern: str) -> Sequence[str]:
    return [part for part in pattern.split("/") if part not in ("", ".")]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches as :func:`glob.glob` matches it, ``**`` included.

    >>> _matches(["out", "a", "model.pt"], ["out", "**", "*.pt"]), _matches([".ssh", "config"], ["**"])
    (True, False)
    """
    if not pattern:
        return not parts
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        if _matches(parts, rest):
            return True
        return bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
    if not parts or (parts[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], first) and _matches(parts[1:], rest)


def _path(value: Any) -> PurePosixPath:
    """Return a path below the directory."""
    path = PurePosixPath(text(16384)(value))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in value:
        raise ValueError(f"the path {value[:60]!a} leaves the directory")
    os.fsencode(path)
    return path


def _is_safe(path: PurePosixPath) -> bool:
    """Return whether a path is not deep, and may be shown: a terminal executes no bytes outside of UTF-8."""
    shown = "".join(each for each in str(path) if not "\udc80" <= each <= "\udcff")
    return shown.isprintable() and len(path.parts) <= MAX_PARTS


_FACTS = fields({"path": _path, "offset": whole(0, 1 << 60)}, {"last": flag, "error": maybe(said())})
"""The head of a piece."""
