# ruff: noqa: PTH100, PTH101, PTH102, PTH103, PTH104, PTH105, PTH107, PTH110, PTH111, PTH112, PTH113, PTH114
# ruff: noqa: PTH116, PTH117, PTH118, PTH119, PTH120, PTH123, PTH202, PTH204, PTH208
"""Packages that the launcher sends to a host: find them in the host's cache, or unpack them into it.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. A package is a directory
that is added to the ranks' module path: ringcomm itself, or a wheel. It is identified by a digest of its
files, which is checked each time before the package is used. The cache is a directory that only this user can
write or replace (:func:`ringcomm.files.why_untrusted`), so what was checked is what is used.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import time
import zipfile
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from ringrun.agent import checks
from ringrun.agent.files import why_untrusted

UNUSED_S = 30 * 24 * 3600.0
"""Packages that no job has used for so long are removed, in seconds."""
_MADE_HERE = re.compile(r"\.?[0-9a-f]{32}(\.gone)?(\.\d+)?|wheels-cp[\d.]+-\w+-glibc[\d.]*")
"""The names of packages and their parts. No others are removed."""
SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Used where the home directory cannot be written."""


class NoPlace(OSError):
    """No directory of this host can hold the packages; the text says why, for each that was tried."""


def digest(files: Iterable[Tuple[str, bytes]]) -> str:
    """The identifier of a package, 32 hexadecimal digits.

    Args:
        files: the relative path, with "/", and the content of each file, in any order.
    """
    whole = hashlib.sha256()
    for name, content in sorted((name, hashlib.sha256(content).digest()) for name, content in files):
        whole.update(name.encode() + b"\0" + content)
    return whole.hexdigest()[:32]


def places(environ: Mapping[str, str]) -> List[str]:
    """The directories that may hold packages, the preferred one first."""
    home = os.path.expanduser("~")
    caches = environ.get("XDG_CACHE_HOME", "")
    chosen = [os.path.join(caches if os.path.isabs(caches) else os.path.join(home, ".cache"), "ringcomm")]
    for folder in (environ.get("TMPDIR", ""), *SHARED_PLACES):
        if os.path.isabs(folder):
            chosen.append(os.path.join(folder, f"ringcomm-{os.getuid()}"))
    return chosen


def find(wanted: str, environ: Mapping[str, str]) -> Optional[str]:
    """The directory of a package in the cache, after a check of its content; None if there is none.

    A directory whose content has changed is removed.

    Args:
        wanted: the package's digest.
        environ: this host's environment.
    """
    for place in places(environ):
        path = os.path.join(place, wanted)
        try:
            if not os.path.isdir(path) or why_untrusted(place):
                continue
            if digest(_files(path)) == wanted:
                os.utime(path)
                return path
            _remove(path)
        except OSError:
            continue  # not readable: the package is sent again, to another place if need be
    return None


def use(wanted: str, data: bytes, env: Dict[str, str]) -> Optional[Dict[str, str]]:
    """Add a package to the ranks' module path.

    Args:
        wanted: the package's digest, or "" if the ranks use what is installed.
        data: the package as a zip file, or b"" to look for it in the cache.
        env: the ranks' environment; changed.

    Returns:
        None if the ranks can use it, an empty dictionary if the launcher must send it, or a problem's facts.
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
    """Unpack a package into the cache and return its directory.

    Two jobs may do this at the same time: each unpacks into a directory of its own and renames it.

    Args:
        data: the package as a zip file.
        wanted: its digest.
        environ: this host's environment.

    Raises:
        NoPlace: no directory can hold it.
        ValueError: the data is not that package.
    """
    files = unzipped(data)
    if digest(files.items()) != wanted:
        raise ValueError("its content is not what the launcher announced")
    reasons = []
    for place in places(environ):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            why = why_untrusted(place)
            if not why:
                return _place(files, place, wanted)
        except OSError as problem:
            why = problem.strerror or str(problem)
        reasons.append(f"{place}: {why}")
    raise NoPlace("; ".join(reasons))


def unzipped(data: bytes) -> Dict[str, bytes]:
    """The files in a zip archive, by their paths.

    Raises:
        ValueError: it is not a zip archive, or a path leaves the directory.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    except (zipfile.BadZipFile, EOFError, RuntimeError) as problem:
        raise ValueError(f"it is not a zip file: {problem}") from None
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"it contains the path {name!r}")
    return files


def _place(files: Mapping[str, bytes], place: str, wanted: str) -> str:
    """Write the files under ``place``; the directory has its final name only when it is complete."""
    _remove_unused(place)
    final, mine = os.path.join(place, wanted), os.path.join(place, f".{wanted}.{os.getpid()}")
    try:
        for name, content in files.items():
            path = os.path.join(mine, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        os.rename(mine, final)
    except OSError:
        shutil.rmtree(mine, ignore_errors=True)
        if not os.path.isdir(final) or digest(_files(final)) != wanted:  # else: another job was faster
            raise
    return final


def _files(path: str) -> Iterator[Tuple[str, bytes]]:
    """All files of a package but the bytecode that Python adds to it."""
    for folder, names, files in os.walk(path):
        if "__pycache__" in names:
            names.remove("__pycache__")
        for name in files:
            whole = os.path.join(folder, name)
            with open(whole, "rb") as file:
                yield os.path.relpath(whole, path).replace(os.sep, "/"), file.read()


def _remove(path: str) -> None:
    """Remove a package that another process may be reading: first its name, then its content."""
    gone = f"{path}.gone.{os.getpid()}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _remove_unused(place: str) -> None:
    oldest = time.time() - UNUSED_S
    for name in filter(_MADE_HERE.fullmatch, os.listdir(place)):
        path = os.path.join(place, name)
        if os.lstat(path).st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)
