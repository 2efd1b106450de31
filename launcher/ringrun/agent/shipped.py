# ruff: noqa: PTH104, PTH111, PTH116, PTH117, PTH118, PTH119, PTH120, PTH208  no pathlib in the agent
"""Packages that the launcher sends to a host: find them in the host's cache, or unpack them into it.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. A package is a directory
that is added to the ranks' module path: ringcomm itself, or a wheel. It is identified by a digest of its
files, which is checked each time before the package is used. Nothing in it can be exchanged between check and
use, because only this user and the administrator can change the cache
(:func:`ringcomm.storage.folders.trusted_folder`); a folder that is not so protected is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import stat
import time
import zipfile
from contextlib import suppress
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from ringcomm.storage import files, folders
from ringrun.agent import checks

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
"""Names from this module and :mod:`ringrun.ship.wheels`: packages, also incomplete, and folders of wheels."""
IN_USE = "in-use.lock"
"""The file in a cache that every job locks, so that `ringrun clean` leaves the cache as it is."""
LOCK_S = 5.0
"""Seconds that cleaning a cache, or the exit of the previous attempt's agent, may take."""
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
    checks.prepend_module_path(env, path)
    return None


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
            files.check_code(name, facts)
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
