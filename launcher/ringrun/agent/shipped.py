# ruff: noqa: PTH104, PTH111, PTH113, PTH116, PTH117, PTH118, PTH119, PTH120, PTH207, PTH208  no pathlib in the agent
"""What the launcher sends to a host: packages and the user's code (``--ship``), both kept in caches; and the
program of ``ringrun clean``, which removes what jobs have left.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, or alone. A package is a
directory that is added to the ranks' module path: ringcomm itself, or a wheel. It is identified by a digest
of its files, which is checked each time before it is used. Nothing in it can be exchanged between check and
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
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.storage import files, folders

UNUSED_S = 30 * 24 * 3600.0  # packages that no job has used for so long are removed
SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Used where the home directory cannot be written or trusted."""
DIGEST = re.compile(r"[0-9a-f]{32}")
PACKAGE = re.compile(r"[0-9a-f]{32}|\.?[0-9a-f]{32}\.[0-9a-f]+|wheels-[\w.-]+")
"""Names from this module and :mod:`ringrun.job.files`: packages, also incomplete; folders of wheels."""
IN_USE = "in-use.lock"
"""The file in a cache that every job locks, so that `ringrun clean` leaves the cache as it is."""
LOCK_S = 5.0  # for cleaning a cache, or the exit of the previous attempt's agent
KEPT_JOBS = 3
CACHE_BYTES = 1 << 30  # above it the least recently used contents are removed
JOB = re.compile(r"[\w-]+")
"""The names of job directories; the lock of a directory is its name with ``.lock``."""
PIECE_BYTES = 1 << 18
MARKER = "ringrun-clean/1"
RECORDS = "ringrun-flight-"
"""The beginning of the names of temporary folders with records."""
MARKER_OF_RECORDS = ".ringrun-records"
"""The file that marks such a folder: another folder may have a similar name."""
_held: Dict[Tuple[int, int], int] = {}


def digest(files: Iterable[Tuple[str, bytes]]) -> str:
    """Return a package's identifier, 32 hexadecimal digits, from each file's path (with "/") and content."""
    whole = hashlib.sha256()
    for name, content in sorted((name, hashlib.sha256(content).digest()) for name, content in files):
        whole.update(name.encode() + b"\0" + content)
    return whole.hexdigest()[:32]


def places(environ: Mapping[str, str]) -> List[str]:
    """Return the directories that may hold packages, the preferred one first."""
    caches = environ.get("XDG_CACHE_HOME", "")
    caches = caches if os.path.isabs(caches) else os.path.join(os.path.expanduser("~"), ".cache")
    shared = [folder for folder in (environ.get("TMPDIR", ""), *SHARED_PLACES) if os.path.isabs(folder)]
    return [os.path.join(caches, "ringcomm"), *(f"{each}/ringcomm-{os.getuid()}" for each in shared)]


def locked(folder: int, name: str, kind: int, limit_s: float) -> int:
    """Return a descriptor of a lock file with the flock `kind`; BlockingIOError after `limit_s` seconds."""
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
    """Keep a cache from being cleaned until this process ends; BlockingIOError if it is being cleaned."""
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


def in_first_place(environ: Mapping[str, str], fill: Callable[[str, int], Any]) -> Any:
    """Return ``fill(directory, descriptor)`` for the first trusted one where it works; OSError names each."""
    reasons = []
    for place in places(environ):
        try:
            with folders.trusted_folder(place) as folder:
                hold(folder)
                return fill(place, folder)
        except OSError as problem:
            reasons.append(f"{place}: {problem.strerror or problem}")
    raise OSError("; ".join(reasons))


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
    """Add a package (`data`: its zip file, or b"") to the module path; {}: the launcher must send it."""
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
    """Unpack a zip file into the cache and return its directory; OSError or ValueError if it cannot be."""
    content = unzipped(data)
    if not DIGEST.fullmatch(wanted) or digest(content.items()) != wanted:
        raise ValueError("its content is not what the launcher announced")
    path: str = in_first_place(environ, lambda place, folder: _place(content, place, folder, wanted))
    return path


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
    "/" at its end, "", False) of an empty directory. All attempts of a job have the same name `job`.
    """

    def __init__(self, job: str, files: Sequence[Sequence[Any]], environ: Mapping[str, str]) -> None:
        self.job, self.files, self.environ = job, files, environ
        self.path: Optional[str] = None
        self._sent: Dict[str, bytes] = {}  # all contents so far: another place may have to take them
        self._lock = -1

    def prepare(self, archive: bytes) -> Dict[str, Any]:
        """Make the directory with the contents in `archive`; return a problem, or the digests that lack."""
        if not self.files or self.path is not None:
            return {}
        try:
            sent = unzipped(archive) if archive else {}
            if any(hashlib.sha256(content).hexdigest()[:32] != name for name, content in sent.items()):
                raise ValueError("a content is not what the launcher announced")
            self._sent.update(sent)
            lacking = in_first_place(self.environ, self._make)
        except (OSError, ValueError) as problem:
            return {"problem": "package", "path": "--ship", "why": str(problem)}
        return {"files": lacking} if lacking else {}

    def _make(self, place: str, folder: int) -> List[str]:
        """Keep the contents that were sent, and make the directory; return the digests of those that lack."""
        with folders.inner_folder(folder, "files") as cache:
            for digest, content in self._sent.items():
                files.write_file(cache, digest, content)
            wanted = sorted({str(digest) for _, digest, _ in self.files if digest})
            # One after the other, here and below: a board's memory may not hold all of them.
            lacking = [digest for digest in wanted if _found(cache, digest) is None]
            if self._sent.keys() & set(lacking):
                raise OSError(f"{place}: a file that was written there cannot be read back")
            if lacking:
                return lacking
            with folders.inner_folder(folder, "jobs") as jobs:
                self._lock = locked(jobs, f"{self.job}.lock", fcntl.LOCK_EX, LOCK_S)
                # A restart finds the last attempt's files.
                with folders.inner_folder(jobs, self.job) as root:
                    self._fill(root, cache)
                _remove_old(jobs)
            _trim(cache)
        self.path = os.path.join(place, "jobs", self.job)
        self._sent.clear()
        return []

    def _fill(self, root: int, cache: int) -> None:
        for name, digest, executable in self.files:
            if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
                raise ValueError(f"the path {name!r} leaves the directory")
            if name.endswith("/"):
                with folders.inner_folder(root, name.rstrip("/")):
                    continue
            content = _found(cache, digest)
            if content is None:
                raise OSError(f"the content of {name} has gone from the cache")
            with folders.inner_folder(root, os.path.dirname(name)) as around:
                files.write_file(around, os.path.basename(name), content, 0o700 if executable else 0o600)

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


def _found(cache: int, digest: str) -> Optional[bytes]:
    """Return a content with the right digest, or None. A changed one is removed."""
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no digest")
    with suppress(OSError):
        content = files.read_at(cache, digest)
        if hashlib.sha256(content).hexdigest()[:32] == digest:
            os.utime(digest, dir_fd=cache, follow_symlinks=False)
            return content
        folders.remove(cache, digest)
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


# -- ringrun clean -----------------------------------------------------------------------------


class Cleaning:
    """Removes leftovers of jobs on this host; with `dry_run` it only lists them. Files of a running job stay:
    every job holds the lock of its folder and of the cache that it uses (:func:`hold`).
    """

    def __init__(self, environ: Mapping[str, str], dry_run: bool) -> None:
        self._environ, self._dry_run = environ, dry_run
        self.removed: List[List[Any]] = []  # kind, path, bytes
        self.kept: List[List[str]] = []  # path, reason

    def run(self) -> Dict[str, Any]:
        """Remove everything that no running job uses; return the attributes as a dictionary."""
        for place in places(self._environ):
            self._in(place, self._clean_place, lambda place: folders.trusted_folder(place, make=False))
        self._in(tempfile.gettempdir(), self._clean_records, folders.temporary_folder)
        return {"removed": self.removed, "kept": self.kept}

    def _in(self, place: str, clean: Any, opens: Any) -> None:
        try:
            with opens(place) as folder:
                clean(place, folder)
        except FileNotFoundError:
            pass  # no job has made it
        except OSError as problem:
            self.kept.append([place, problem.strerror or str(problem)])

    def _clean_place(self, place: str, folder: int) -> None:
        try:
            with folders.inner_folder(folder, "jobs", None) as jobs:
                self._clean_jobs(os.path.join(place, "jobs"), jobs)
        except FileNotFoundError:
            pass  # --ship was never used
        try:
            lock = locked(folder, IN_USE, fcntl.LOCK_EX, 0.0)
        except BlockingIOError:
            self.kept.append([place, "a running job may use it"])
            return
        try:
            for what, pattern in (("package", PACKAGE), ("shipped files", re.compile("files"))):
                for name, _ in folders.owned_names(folder, pattern):
                    self._remove(what, place, folder, name)
        finally:
            os.close(lock)

    def _clean_jobs(self, place: str, jobs: int) -> None:
        for name, _ in folders.owned_names(jobs, JOB):
            lock = f"{name}.lock"
            try:
                descriptor = locked(jobs, lock, fcntl.LOCK_EX, 0.0)
            except BlockingIOError:
                self.kept.append([os.path.join(place, name), "its job runs"])
                continue
            self._remove("job folder", place, jobs, name)
            if not self._dry_run:
                folders.remove(jobs, lock)
            os.close(descriptor)

    def _clean_records(self, place: str, folder: int) -> None:
        for name, _ in folders.owned_names(folder, re.compile(rf"{RECORDS}\w+")):
            if folders.has_marker(folder, name, MARKER_OF_RECORDS):
                self._remove("folder of records", place, folder, name)

    def _remove(self, what: str, place: str, folder: int, name: str) -> None:
        path = os.path.join(place, name)
        try:
            size = _size_bytes(folder, name)
            if not self._dry_run:
                folders.remove(folder, name)
        except OSError as problem:
            self.kept.append([path, problem.strerror or str(problem)])
        else:
            self.removed.append([what, path, size])


def _size_bytes(folder: int, name: str) -> int:
    facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_size
    with folders.inner_folder(folder, name, None) as inner:
        return sum(_size_bytes(inner, each) for each in os.listdir(inner))


def main() -> None:
    """Answer the commands on stdin, each a line of JSON, until it ends."""
    sys.stdout.write("\n" + MARKER + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        found = Cleaning(os.environ, json.loads(line)["dry_run"]).run()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
