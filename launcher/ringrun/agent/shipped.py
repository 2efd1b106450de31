# ruff: noqa: PTH104, PTH111, PTH113, PTH116, PTH117, PTH118, PTH119, PTH120, PTH207, PTH208  no pathlib in the agent
"""What the launcher sends to a host: packages and the user's code (``--ship``), both kept in caches.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. A package is a directory
that is added to the ranks' module path: ringcomm itself, or a wheel. It is identified by a digest of its
files, which is checked each time before the package is used. Nothing in it can be exchanged between check and
use, because only this user and the administrator can change the cache
(:func:`ringcomm.storage.folders.trusted_folder`); a folder that is not so protected is skipped. Files of the
user are kept by their digests, and copied into a new directory for each job, because programs write there.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import re
import stat
import time
import zipfile
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.storage import files, folders

UNUSED_S = 30 * 24 * 3600.0
"""Packages that no job has used for this time are removed, in seconds."""
SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Used where the home directory cannot be written or trusted."""
PROGRAMS = "ringcomm-agent"
"""The folder of the agent's programs, among the user's caches."""
KEPT_PROGRAMS = 3
"""Maximum number of programs in the cache (one per version of ringrun), the most recently used."""
DIGEST = re.compile(r"[0-9a-f]{32}")
PROGRAM = re.compile(r"[0-9a-f]{64}")
PACKAGE = re.compile(r"[0-9a-f]{32}|\.?[0-9a-f]{32}\.[0-9a-f]+|wheels-[\w.-]+")
"""Names from this module and :mod:`ringrun.ship.contents`: packages, also incomplete; folders of wheels."""
IN_USE = "in-use.lock"
"""The file in a cache that every job locks, so that `ringrun clean` leaves the cache as it is."""
LOCK_S = 5.0
"""Seconds that cleaning a cache, or the exit of the previous attempt's agent, may take."""
KEPT_JOBS = 3
CACHE_BYTES = 1 << 30
"""Above this size the least recently used contents are removed."""
JOB = re.compile(r"[\w-]+")
"""The names of job directories; the lock of a directory is its name with ``.lock``."""
PIECE_BYTES = 1 << 18
_held: Dict[Tuple[int, int], int] = {}


class NoPlace(OSError):
    """No directory of this host can hold the packages; the text says why, for each that was tried."""


def digest(files: Iterable[Tuple[str, bytes]]) -> str:
    """Return a package's identifier, 32 hexadecimal digits, from each file's path (with "/") and content."""
    whole = hashlib.sha256()
    for name, content in sorted((name, hashlib.sha256(content).digest()) for name, content in files):
        whole.update(name.encode() + b"\0" + content)
    return whole.hexdigest()[:32]


def _caches(environ: Mapping[str, str]) -> str:
    caches = environ.get("XDG_CACHE_HOME", "")
    return caches if os.path.isabs(caches) else os.path.join(os.path.expanduser("~"), ".cache")


def places(environ: Mapping[str, str]) -> List[str]:
    """Return the directories that may hold packages, the preferred one first."""
    chosen = [os.path.join(_caches(environ), "ringcomm")]
    for folder in (environ.get("TMPDIR", ""), *SHARED_PLACES):
        if os.path.isabs(folder):
            chosen.append(os.path.join(folder, f"ringcomm-{os.getuid()}"))
    return chosen


def place_of_programs(environ: Mapping[str, str]) -> str:
    """Return the directory of the agent's programs."""
    return os.path.join(_caches(environ), PROGRAMS)


def locked(folder: int, name: str, kind: int, limit_s: float) -> int:
    """Return a descriptor of a file in a folder, made if it is missing, with the flock `kind` of this
    process. BlockingIOError after `limit_s` seconds; another OSError if there is no such file and it cannot
    be made.
    """
    descriptor = files.open_lock(folder, name)
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise
            time.sleep(0.05)


def hold(folder: int) -> None:
    """Keep a cache (its descriptor) from being cleaned until this process ends. BlockingIOError if it is
    being cleaned for more than :data:`LOCK_S`.
    """
    facts = os.fstat(folder)
    key = (facts.st_dev, facts.st_ino)
    if key in _held:
        return
    try:
        _held[key] = locked(folder, IN_USE, fcntl.LOCK_SH, LOCK_S)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a read-only or full file system, from which little can be removed either


def in_first_place(environ: Mapping[str, str], fill: Callable[[str, int], str]) -> str:
    """Return ``fill(directory, descriptor)`` for the first trusted and writable directory; an OSError of
    `fill` leads to the next one, :class:`NoPlace` is raised after the last.
    """
    reasons = []
    for place in places(environ):
        try:
            with folders.trusted_folder(place) as folder:
                hold(folder)
                return fill(place, folder)
        except OSError as problem:
            reasons.append(f"{place}: {problem.strerror or problem}")
    raise NoPlace("; ".join(reasons))


def keep_program(program: bytes, environ: Mapping[str, str]) -> None:
    """Keep the agent's program for the next start, if possible; b"" is a program that came from the cache."""
    if not program:
        return
    try:
        with folders.trusted_folder(place_of_programs(environ)) as folder:
            files.write_file(folder, hashlib.sha256(program).hexdigest(), program)
            for name, _ in folders.owned_names(folder, PROGRAM)[KEPT_PROGRAMS:]:
                folders.remove(folder, name)
    except OSError:
        pass  # it is sent at every start


def find(wanted: str, environ: Mapping[str, str]) -> Optional[str]:
    """Return the directory of a package in the cache, or None. One with changed content is removed."""
    for place in places(environ):
        try:
            with folders.trusted_folder(place, make=False) as folder:
                if _is_package(folder, wanted):
                    hold(folder)  # utime fails if it has just been cleaned
                    os.utime(wanted, dir_fd=folder, follow_symlinks=False)
                    return os.path.join(place, wanted)
                _remove(folder, wanted)
        except OSError:
            continue  # not readable: the package is sent again, to another place if need be
    return None


def use(wanted: str, data: bytes, env: Dict[str, str]) -> Optional[Dict[str, str]]:
    """Add the package with the digest `wanted` ("": none) to the module path in `env`. `data` is its zip
    file, b"" to look for it in the cache. Return None if ranks can use it, {} if the launcher must send it,
    or a problem's facts.
    """
    if not wanted:
        return None
    try:
        path = unpack(data, wanted, os.environ) if data else find(wanted, os.environ)
    except (OSError, ValueError) as problem:
        return {"problem": "package", "path": wanted, "why": str(problem)}
    if path is None:
        return {}
    prepend_module_path(env, path)
    return None


def prepend_module_path(env: Dict[str, str], folder: str) -> None:
    """Make Python look into a directory first, by an entry in ``PYTHONPATH``."""
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = folder + os.pathsep + before if before else folder


def unpack(data: bytes, wanted: str, environ: Mapping[str, str]) -> str:
    """Unpack a zip file into the cache and return its directory. Two jobs may do this at the same time: each
    unpacks into a separate directory and renames it. :class:`NoPlace` if no directory can hold it, ValueError
    if the data is not the package `wanted`.
    """
    content = unzipped(data)
    if not DIGEST.fullmatch(wanted) or digest(content.items()) != wanted:
        raise ValueError("its content is not what the launcher announced")
    return in_first_place(environ, lambda place, folder: _place(content, place, folder, wanted))


def unzipped(data: bytes) -> Dict[str, bytes]:
    """Return the files in a zip archive by path; ValueError for another format or a path outside."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    except (zipfile.BadZipFile, EOFError, RuntimeError) as problem:
        raise ValueError(f"it is not a zip file: {problem}") from None
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"it contains the path {name!r}")
    return files


def _place(content: Mapping[str, bytes], place: str, folder: int, wanted: str) -> str:
    """Write the files under ``place``; the directory has its final name only when it is complete."""
    _remove_unused(folder)
    mine = folders.new_folder(folder, f".{wanted}.")
    try:
        with folders.inner_folder(folder, mine) as inner:
            for name, data in content.items():
                with folders.inner_folder(inner, os.path.dirname(name)) as around:
                    files.write_file(around, os.path.basename(name), data)
        os.rename(mine, wanted, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        folders.remove(folder, mine)
        if not _is_package(folder, wanted):  # else: another job was faster
            raise
    return os.path.join(place, wanted)


def _is_package(folder: int, wanted: str) -> bool:
    """Return whether a directory exists and holds a package; OSError if another user could change it."""
    try:
        with folders.inner_folder(folder, wanted, None) as inner:
            return digest(_files(inner)) == wanted
    except FileNotFoundError:
        return False


def _files(folder: int, above: str = "") -> Iterator[Tuple[str, bytes]]:
    """Yield the files of a package, without Python's bytecode, of which only the owner is checked."""
    for name in os.listdir(folder):
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            with folders.inner_folder(folder, name, None) as inner:
                yield from _files(inner, f"{above}{name}/")
        elif above.endswith("__pycache__/"):
            files.check_code(name, facts, f"/proc/self/fd/{folder}/{name}")
        else:
            yield above + name, files.read_at(folder, name)


def _remove(folder: int, name: str) -> None:
    """Remove a package that another process may be reading: first its name, then its content."""
    gone = f"{name}.{os.urandom(8).hex()}"
    os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
    folders.remove(folder, gone)


def _remove_unused(folder: int) -> None:
    oldest = time.time() - UNUSED_S
    for name, facts in folders.owned_names(folder, PACKAGE):
        if facts.st_mtime < oldest:
            with suppress(OSError):  # another agent has just removed it, or it is on a read-only place
                folders.remove(folder, name)


# -- the user's code --------------------------------------------------------------------------


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
            self.make(unzipped(archive) if archive else {})
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
        raises :class:`.NoPlace`, or ValueError for a path outside or a missing or changed content.
        """
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest()[:32] != digest:
                raise ValueError("a content is not what the launcher announced")
        self.path = in_first_place(
            self.environ, lambda place, folder: self._make(place, folder, contents)
        )
        return self.path

    @contextmanager
    def _caches(self) -> Iterator[List[int]]:
        """Yield descriptors of this host's trusted folders of contents."""
        with ExitStack() as opened:
            found = []
            for place in places(self.environ):
                try:
                    folder = opened.enter_context(folders.trusted_folder(place, make=False))
                    found.append(opened.enter_context(folders.inner_folder(folder, "files", None)))
                    hold(folder)
                except OSError:
                    continue  # not there, or not to be trusted
            yield found

    def _make(self, place: str, folder: int, contents: Mapping[str, bytes]) -> str:
        with folders.inner_folder(folder, "files") as cache:
            for digest, content in contents.items():
                files.write_file(cache, digest, content)
            with folders.inner_folder(folder, "jobs") as jobs:
                self._lock = locked(jobs, f"{self.job}.lock", fcntl.LOCK_EX, LOCK_S)
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
    if not DIGEST.fullmatch(digest):
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
    for name, facts in folders.owned_names(cache, DIGEST):
        total += facts.st_size
        if total > CACHE_BYTES:
            with suppress(OSError):  # another agent has just removed it
                folders.remove(cache, name)


def _remove_old(jobs: int) -> None:
    """Remove job directories, except for the last ones and those of running jobs."""
    for name, _ in folders.owned_names(jobs, JOB)[KEPT_JOBS:]:
        with suppress(OSError):  # its job runs, or a file cannot be removed
            descriptor = locked(jobs, f"{name}.lock", fcntl.LOCK_EX, 0.0)
            try:
                folders.remove(jobs, name)
                folders.remove(jobs, f"{name}.lock")
            finally:
                os.close(descriptor)
