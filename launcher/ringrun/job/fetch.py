"""Writes the files that hosts send back (``--fetch``)."""

from __future__ import annotations

import json
import os
import posixpath
from collections import Counter
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, NamedTuple, Sequence
from typing import Counter as Counts

from ringcomm.errors import ProtocolError
from ringcomm.files import new_file, write_all
from ringcomm.folders import inner_folder, own_folder

from ..plan.job import HostJob, Job

HOST_LIMIT_BYTES = 64 << 30
"""No more than this is written for one host."""
HOST_LIMIT_FILES = 100_000
_MAX_PROBLEMS = 100


class _Incoming(NamedTuple):
    """The file that a host is sending.

    Attributes:
        path: relative to the host's directory.
        descriptor: of the new file; -1 if it cannot be written.
        size: how much of it has come, in bytes.
    """

    path: str
    descriptor: int
    size: int


class FetchedFiles:
    """The files of one job, in one directory per host.

    Args:
        folder: the directory; it is made when the first file arrives.
        patterns: of the files that were asked for (:meth:`ringrun.agent.job_folder.JobFolder.fetched`).
    """

    def __init__(self, folder: Path, patterns: Sequence[str]) -> None:
        self._folder, self._patterns = folder, tuple(patterns)
        self._incoming: Dict[str, _Incoming] = {}
        self._files: Counts[str] = Counter()
        self._bytes: Counts[str] = Counter()
        self._problems: List[str] = []

    def take(self, sender: HostJob, data: bytes) -> None:
        """Write one piece of a file.

        Args:
            sender: the host that sent it.
            data: a line of JSON with ``path`` and ``offset``, and perhaps ``error``; then the bytes.

        Raises:
            ProtocolError: no file is fetched from this host, or it is malformed, its path leaves the
                directory or matches no pattern, or it is not the next piece.
        """
        host = sender.name
        if not (self._patterns and sender.gets_code):
            raise ProtocolError("a file, though this job fetches none from it")
        line, _, piece = data.partition(b"\n")
        facts = _facts(line)
        path, offset = str(PurePosixPath(facts["path"])), facts["offset"]
        if not any(matches(path, pattern) for pattern in self._patterns):
            raise ProtocolError(f"a file that was not asked for: {path!r:.200}")
        if "error" in facts:
            self._close(host)
            self._note(f"{host}: {path} could not be read: {str(facts['error'])[:200]}")
            return
        if not offset:
            self._close(host)
            self._incoming[host] = _Incoming(path, self._begin(host, path), 0)
        now = self._incoming.get(host)
        if now is None or (now.path, now.size) != (path, offset):
            raise ProtocolError(f"byte {offset} of {path!r:.200}, which is not the next piece")
        written = self._write(host, now, piece)
        self._incoming[host] = _Incoming(path, written, offset + len(piece))

    def _begin(self, host: str, path: str) -> int:
        """A descriptor of a new file; -1 if it cannot be made."""
        folder, name = posixpath.split(path)
        if self._files[host] >= HOST_LIMIT_FILES:
            self._note(f"{host} sent more than {HOST_LIMIT_FILES} files; the others were left out")
            return -1
        if self._bytes[host] > HOST_LIMIT_BYTES:
            return -1
        inside = posixpath.join(host.replace("/", "_"), folder).rstrip("/")
        try:
            with own_folder(self._folder) as top, inner_folder(top, inside, 0o777) as around:
                descriptor = new_file(around, name, 0o666)
        except OSError as problem:
            self._not_written(host, path, problem)
            return -1
        self._files[host] += 1
        return descriptor

    def _write(self, host: str, now: _Incoming, piece: bytes) -> int:
        """Write a piece; returns the descriptor, or -1 from the first error on."""
        if now.descriptor < 0:
            return -1
        self._bytes[host] += len(piece)
        try:
            if self._bytes[host] <= HOST_LIMIT_BYTES:
                write_all(now.descriptor, piece)
                return now.descriptor
            self._note(f"{host} sent more than {HOST_LIMIT_BYTES >> 30} GiB; the rest was left out")
        except OSError as problem:
            self._not_written(host, now.path, problem)
        os.close(now.descriptor)
        return -1

    def _not_written(self, host: str, path: str, problem: OSError) -> None:
        self._note(f"{self._folder / host / path} could not be written: {problem.strerror}")

    def _note(self, text: str) -> None:
        if text not in self._problems and len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(text)

    def _close(self, host: str) -> None:
        before = self._incoming.pop(host, None)
        if before is not None and before.descriptor >= 0:
            os.close(before.descriptor)

    def describe(self, job: Job) -> str:
        """What was fetched from each host of the job, and what went wrong, in lines. No more pieces come."""
        for name in list(self._incoming):
            self._close(name)
        lines = []
        for host in job.hosts:
            if host.gets_code and self._files[host.name]:
                count, size = self._files[host.name], self._bytes[host.name]
                plural = "" if count == 1 else "s"
                text = f"fetched {count} file{plural}, {size / 1e6:.1f} MB, from {host.name}"
                lines.append(f"{text} into {self._folder / host.name}")
            elif host.gets_code:
                lines.append(f"{host.name} sent no file that matches {' or '.join(job.fetch)}")
        return "\n".join([*lines, *self._problems])


@lru_cache(maxsize=1024)
def matches(path: str, pattern: str) -> bool:
    """Whether a relative path matches a pattern, as :mod:`glob` (with ``recursive``) finds files. Pure."""
    names, wanted = path.split("/"), posixpath.normpath(pattern).split("/")
    reached = {0}  # by how many names the words of the pattern so far can be matched
    for word in wanted:
        further = set()
        for count in reached:
            if word == "**":
                further.add(count)
                while count < len(names) and not names[count].startswith("."):
                    count += 1
                    further.add(count)
            elif count < len(names) and _matches_name(names[count], word):
                further.add(count + 1)
        reached = further
    return len(names) in reached


def _matches_name(name: str, word: str) -> bool:
    return fnmatchcase(name, word) and (word.startswith(".") or not name.startswith("."))


def _facts(line: bytes) -> Dict[str, Any]:
    try:
        facts = json.loads(line.decode())
        path, offset = PurePosixPath(facts["path"]), facts["offset"]
        is_name = b"\0" not in os.fsencode(path)
    except (ValueError, TypeError, LookupError, RecursionError) as problem:
        raise ProtocolError(f"a file without a description: {problem!r}") from None
    if not is_name:
        raise ProtocolError(f"a file whose path {str(path)!r} is no path")
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ProtocolError(f"a file whose path {str(path)!r} leaves the directory")
    if type(offset) is not int or offset < 0:
        raise ProtocolError(f"a file that begins at {offset!r:.40}")
    return dict(facts)
