# ruff: noqa: PTH108, PTH100, PTH101, PTH102, PTH103, PTH104, PTH105, PTH107, PTH110, PTH111, PTH112, PTH113, PTH114
# ruff: noqa: PTH116, PTH117, PTH118, PTH119, PTH120, PTH123, PTH202, PTH204, PTH207, PTH208
"""The directory of a job whose code was sent with ``--ship``: made from a cache of files, and fetched from.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. Contents are kept by
their digests, and copied into a new directory for each job, because programs write into theirs. The
directories of the last jobs are kept.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set

from ringrun.agent import shipped
from ringrun.agent.files import why_untrusted

KEPT_JOBS = 3
CACHE_BYTES = 1 << 30
"""The contents that were not used for the longest time are removed above this."""
PIECE_BYTES = 1 << 18
_CONTENT = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.\d+")
"""The names of contents. No other files are removed."""
LOCK_S = 5.0
"""How long the agent of the attempt before may take to leave."""


class JobFolder:
    """The files of one job on this host.

    Args:
        job: the name of the directory, the same in all attempts of a job with ``--restarts``.
        files: (path, digest, whether it is executable) of each file.
        environ: this host's environment.

    Attributes:
        path: the directory, once it is made.
    """

    def __init__(self, job: str, files: Sequence[Sequence[Any]], environ: Mapping[str, str]) -> None:
        self.job, self.files, self.environ = job, files, environ
        self.path: Optional[str] = None
        self._lock = -1

    def prepare(self, archive: bytes) -> Dict[str, Any]:
        """Make the directory, or find out what it lacks.

        Args:
            archive: the contents that were lacking, as a zip file of digests; b"" at first.

        Returns:
            ``files``, the digests that this host lacks; or a problem's facts; or nothing.
        """
        if not self.files:
            return {}
        try:
            lacking = [] if archive else self.lacking()
            if lacking:
                return {"files": lacking}
            self.make(shipped.unzipped(archive) if archive else {})
        except (OSError, ValueError) as problem:
            return {"problem": "package", "path": "--ship", "why": str(problem)}
        return {}

    def lacking(self) -> List[str]:
        """The digests of the contents that are in no cache of this host."""
        wanted = {str(digest) for _, digest, _ in self.files}
        return sorted(digest for digest in wanted if self._find(digest) is None)

    def make(self, contents: Mapping[str, bytes]) -> str:
        """Make the directory.

        Args:
            contents: the contents that this host lacks, by their digests.

        Returns:
            Its path.

        Raises:
            shipped.NoPlace: no directory of this host has room for it.
            ValueError: a path leaves the directory, or a content is missing or not the announced one.
        """
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest()[:32] != digest:
                raise ValueError("a content is not what the launcher announced")
        reasons = []
        for place in shipped.places(self.environ):
            try:
                os.makedirs(place, mode=0o700, exist_ok=True)
                why = why_untrusted(place)
                if not why:
                    self.path = self._make(place, contents)
                    return self.path
            except OSError as problem:
                why = problem.strerror or str(problem)
            reasons.append(f"{place}: {why}")
        raise shipped.NoPlace("; ".join(reasons))

    def _find(self, digest: str) -> Optional[str]:
        for place in shipped.places(self.environ):
            path = os.path.join(place, "files", digest)
            try:
                if why_untrusted(place) or not os.path.isfile(path):
                    continue
                with open(path, "rb") as file:
                    if hashlib.sha256(file.read()).hexdigest()[:32] == digest:
                        os.utime(path)
                        return path
                os.unlink(path)
            except OSError:
                continue
        return None

    def _make(self, place: str, contents: Mapping[str, bytes]) -> str:
        cache, jobs = os.path.join(place, "files"), os.path.join(place, "jobs")
        for folder in (cache, jobs):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for digest, content in contents.items():
            mine = os.path.join(cache, f".{digest}.{os.getpid()}")
            with open(mine, "wb") as file:
                file.write(content)
            os.rename(mine, os.path.join(cache, digest))
        path = os.path.join(jobs, self.job)
        os.makedirs(path, mode=0o700, exist_ok=True)  # a restart finds what the last attempt has written
        self._lock = _locked(path + ".lock", LOCK_S)
        made: Set[str] = set()
        for name, digest, executable in self.files:
            _check_inside(name)
            source, target = self._find(digest), os.path.join(path, name)
            if source is None:
                raise ValueError(f"the content of {name} did not arrive")
            folder = os.path.dirname(target)
            if folder not in made:
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            shutil.copyfile(source, target)
            os.chmod(target, 0o700 if executable else 0o600)
        _trim(cache)
        _remove_old(jobs)
        return path

    def fetched(self, patterns: Sequence[str]) -> Iterator[bytes]:
        """The files that match, for the launcher: per piece a line of JSON (path, offset) and the bytes.

        Args:
            patterns: as of :mod:`glob`, relative to the directory; ``**`` is any number of directories.
        """
        assert self.path is not None
        seen: Set[str] = set()
        root = os.path.realpath(self.path)
        for pattern in patterns:
            for name in sorted(glob.glob(os.path.join(glob.escape(root), pattern), recursive=True)):
                real, inside = os.path.realpath(name), os.path.relpath(name, root)
                if real.startswith(root + os.sep) and os.path.isfile(real) and inside not in seen:
                    seen.add(inside)
                    yield from _pieces(real, inside)


def _pieces(path: str, name: str) -> Iterator[bytes]:
    offset = 0
    try:
        with open(path, "rb") as file:
            piece, following = file.read(PIECE_BYTES), b"more"
            while following:
                following = file.read(PIECE_BYTES) if piece else b""
                facts = {"path": name, "offset": offset, "last": not following}
                yield json.dumps(facts).encode() + b"\n" + piece
                offset += len(piece)
                piece = following
    except OSError as problem:
        yield json.dumps({"path": name, "offset": offset, "error": problem.strerror}).encode() + b"\n"


def _locked(path: str, limit_s: float) -> int:
    """A descriptor of the file, locked for this process.

    Raises:
        BlockingIOError: another process has held the lock for this long.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise
            time.sleep(0.05)


def _check_inside(name: str) -> None:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise ValueError(f"the path {name!r} leaves the directory")


def _trim(cache: str) -> None:
    """Remove contents that have not been used for the longest time, if there are too many bytes."""
    rows = []
    for name in filter(_CONTENT.fullmatch, os.listdir(cache)):
        facts = os.lstat(os.path.join(cache, name))
        rows.append((facts.st_mtime, facts.st_size, name))
    total = sum(size for _, size, _ in rows)
    for _, size, name in sorted(rows):
        if total <= CACHE_BYTES:
            break
        os.unlink(os.path.join(cache, name))
        total -= size


def _remove_old(jobs: str) -> None:
    """Keep the directories of the last jobs, and of those that run."""
    names = [name for name in os.listdir(jobs) if not name.endswith(".lock")]
    names.sort(key=lambda name: os.stat(os.path.join(jobs, name)).st_mtime, reverse=True)
    for name in names[KEPT_JOBS:]:
        lock = os.path.join(jobs, name + ".lock")
        try:
            descriptor = _locked(lock, 0.0)
        except BlockingIOError:
            continue  # its job runs
        shutil.rmtree(os.path.join(jobs, name), ignore_errors=True)
        os.unlink(lock)
        os.close(descriptor)
