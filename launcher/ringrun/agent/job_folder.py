# ruff: noqa: PTH113, PTH118, PTH119, PTH120, PTH207  no pathlib in the agent
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
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set

from ringcomm.storage import files, folders
from ringrun.agent import shipped

KEPT_JOBS = 3
CACHE_BYTES = 1 << 30
"""Above this size the least recently used contents are removed."""
JOB = re.compile(r"[\w-]+")
"""The names of job directories; the lock of a directory is its name with ``.lock``."""
PIECE_BYTES = 1 << 18


class JobFolder:
    """The files of one job on this host: (path, digest, whether it is executable) of each file; (path with
    "/" at its end, "", False) of an empty directory. The name `job` is the same in all attempts of a job with
    ``--restarts``; `path` is None until the directory is made.
    """

    def __init__(self, job: str, files: Sequence[Sequence[Any]], environ: Mapping[str, str]) -> None:
        self.job, self.files, self.environ = job, files, environ
        self.path: Optional[str] = None
        self._lock = -1

    def prepare(self, archive: bytes) -> Dict[str, Any]:
        """Make the directory unless it is made; return ``files``, the digests that this host lacks, or a
        problem's facts, or nothing. `archive` is a zip file of the lacking contents by digest, b"" at first.
        """
        if not self.files or self.path is not None:
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
        """Return the digests of the contents that are in no cache of this host."""
        wanted = {str(digest) for _, digest, _ in self.files if digest}
        with self._caches() as caches:
            return sorted(digest for digest in wanted if _found(caches, digest) is None)

    def make(self, contents: Mapping[str, bytes]) -> str:
        """Make the directory from the cache and the lacking `contents` by digest, and return its path. It
        raises :class:`.shipped.NoPlace`, or ValueError for a path outside or a missing or changed content.
        """
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest()[:32] != digest:
                raise ValueError("a content is not what the launcher announced")
        self.path = shipped.in_first_place(
            self.environ, lambda place, folder: self._make(place, folder, contents)
        )
        return self.path

    @contextmanager
    def _caches(self) -> Iterator[List[int]]:
        """Yield descriptors of this host's trusted folders of contents."""
        with ExitStack() as opened:
            found = []
            for place in shipped.places(self.environ):
                try:
                    folder = opened.enter_context(folders.trusted_folder(place, make=False))
                    found.append(opened.enter_context(folders.inner_folder(folder, "files", None)))
                    shipped.hold(folder)
                except OSError:
                    continue  # not there, or not to be trusted
            yield found

    def _make(self, place: str, folder: int, contents: Mapping[str, bytes]) -> str:
        with folders.inner_folder(folder, "files") as cache:
            for digest, content in contents.items():
                files.write_file(cache, digest, content)
            with folders.inner_folder(folder, "jobs") as jobs:
                self._lock = shipped.locked(jobs, f"{self.job}.lock", fcntl.LOCK_EX, shipped.LOCK_S)
                # A restart finds the last attempt's files.
                with folders.inner_folder(jobs, self.job) as root, self._caches() as caches:
                    self._fill(root, caches)
                _remove_old(jobs)
            _trim(cache)
        return os.path.join(place, "jobs", self.job)

    def _fill(self, root: int, caches: Sequence[int]) -> None:
        for name, digest, executable in self.files:
            if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
                raise ValueError(f"the path {name!r} leaves the directory")
            if name.endswith("/"):
                with folders.inner_folder(root, name.rstrip("/")):
                    continue
            content = _found(caches, digest)
            if content is None:
                raise ValueError(f"the content of {name} did not arrive")
            with folders.inner_folder(root, os.path.dirname(name)) as around:
                mode = 0o700 if executable else 0o600
                files.write_file(around, os.path.basename(name), content, mode)

    def fetched(self, patterns: Sequence[str]) -> Iterator[bytes]:
        """Yield the files that match glob patterns in pieces: a line of JSON (path, offset, last), bytes."""
        assert self.path is not None
        seen: Set[str] = set()
        root = os.path.realpath(self.path)
        with folders.own_folder(root, None) as opened:
            for pattern in patterns:
                for name in sorted(glob.glob(os.path.join(glob.escape(root), pattern), recursive=True)):
                    real, inside = os.path.realpath(name), os.path.relpath(name, root)
                    if real.startswith(root + os.sep) and os.path.isfile(real) and inside not in seen:
                        seen.add(inside)
                        yield from _pieces(opened, os.path.relpath(real, root), inside)


def _pieces(root: int, path: str, name: str) -> Iterator[bytes]:
    """Yield the file `path` (without links, below the descriptor `root`) in pieces, under `name`."""
    offset = 0
    try:
        with folders.inner_folder(root, os.path.dirname(path), None) as around:
            descriptor = files.open_at(around, os.path.basename(path))
        with open(descriptor, "rb") as file:
            piece, following = file.read(PIECE_BYTES), b"more"
            while following:
                following = file.read(PIECE_BYTES) if piece else b""
                facts = {"path": name, "offset": offset, "last": not following}
                yield json.dumps(facts).encode() + b"\n" + piece
                offset += len(piece)
                piece = following
    except OSError as problem:
        yield json.dumps({"path": name, "offset": offset, "error": problem.strerror}).encode() + b"\n"


def _found(caches: Sequence[int], digest: str) -> Optional[bytes]:
    """Return a content with the right digest from one of the folders, or None. A changed one is removed."""
    if not shipped.DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no digest")
    for cache in caches:
        try:
            content = files.read_at(cache, digest)
            if hashlib.sha256(content).hexdigest()[:32] == digest:
                os.utime(digest, dir_fd=cache, follow_symlinks=False)
                return content
            folders.remove(cache, digest)
        except OSError:
            continue
    return None


def _trim(cache: int) -> None:
    """Remove the least recently used contents above :data:`CACHE_BYTES`."""
    total = 0
    for name, facts in folders.owned_names(cache, shipped.DIGEST):
        total += facts.st_size
        if total > CACHE_BYTES:
            with suppress(OSError):  # another agent has just removed it
                folders.remove(cache, name)


def _remove_old(jobs: int) -> None:
    """Remove job directories, except for the last ones and those of running jobs."""
    for name, _ in folders.owned_names(jobs, JOB)[KEPT_JOBS:]:
        with suppress(OSError):  # its job runs, or a file cannot be removed
            descriptor = shipped.locked(jobs, f"{name}.lock", fcntl.LOCK_EX, 0.0)
            try:
                folders.remove(jobs, name)
                folders.remove(jobs, f"{name}.lock")
            finally:
                os.close(descriptor)
