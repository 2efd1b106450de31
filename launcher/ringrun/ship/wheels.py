"""The wheels of the packages that ringcomm needs, for hosts that lack them (``--provision``).

They are downloaded on this machine by pip, for the interpreter, the processor and the C library of the host,
and kept for the next job, in a folder in which no other user can change anything
(:func:`ringcomm.storage.folders.trusted_folder`). A wheel is a zip file whose extension modules find their
own libraries by relative paths, so the host only has to unpack it into a directory on the module path: it
needs neither pip nor a virtual environment.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import zipfile
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError
from ringcomm.storage.files import open_at, read_at, write_file
from ringcomm.storage.folders import inner_folder, new_folder, owned_names, remove

from ..agent.checks import PROVISIONED
from ..agent.shipped import NoPlace, in_first_place
from ..plan.reaching import last_lines
from .package import Package

DOWNLOAD_LIMIT_S = 120.0
_OLDEST_GLIBC = 5
_WHEEL = re.compile(r"[\w.+!-]+\.whl")


class Target(NamedTuple):
    """The interpreter that a wheel is for."""

    version: str  # of CPython, like "3.8"
    machine: str  # as `uname -m` prints it
    glibc: str  # like "2.31"; "" for another C library


def platform_tags(target: Target) -> List[str]:
    """Return the platform tags of wheels that a host can use, the newest first (PEP 600)."""
    major, _, minor = target.glibc.partition(".")
    if major != "2" or not re.fullmatch("[0-9]{1,3}", minor):
        raise ConfigError(
            f"--provision: the C library of that host is {target.glibc or 'not glibc'}; there are wheels for "
            "glibc only. Install numpy there with the system's package manager."
        )
    tags = [f"manylinux_2_{number}_{target.machine}" for number in range(int(minor), _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{target.machine}", f"manylinux1_{target.machine}"]


def download_argv(target: Target, folder: str, names: Sequence[str]) -> List[str]:
    """Return the command line of pip that downloads wheels. Pure."""
    platforms = [word for tag in platform_tags(target) for word in ("--platform", tag)]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", target.version, *platforms,
        "--dest", folder, *names,
    ]  # fmt: skip


def fetch_wheels(
    target: Target, environ: Optional[Mapping[str, str]] = None, names: Sequence[str] = PROVISIONED
) -> Tuple[Package, List[str]]:
    """Return one package of wheels, and a line with name and SHA-256 for each that was downloaded now."""
    wheels: Dict[str, bytes] = {}
    lines: List[str] = []

    def fill(place: str, folder: int) -> str:
        name = f"wheels-cp{target.version}-{target.machine}-glibc{target.glibc}"
        with inner_folder(folder, name) as kept:
            known = _kept(kept)
            wheels.update(_of(names, known))
            missing = [each for each in names if not _of([each], known)]
            fresh = _downloaded(target, kept, os.path.join(place, name), missing)  # noqa: PTH118
            for wheel, data in sorted(fresh.items()):
                write_file(kept, wheel, data)
                lines.append(f"{wheel} (sha256 {hashlib.sha256(data).hexdigest()})")
            wheels.update(fresh)
        return name

    try:
        in_first_place(os.environ if environ is None else environ, fill)
    except NoPlace as problem:
        raise ConfigError(f"--provision: no directory can hold the wheels: {problem}.") from None
    return _package(wheels), lines


def _of(names: Sequence[str], wheels: Mapping[str, bytes]) -> Dict[str, bytes]:
    """Return the wheels of some packages."""
    starts = tuple(f"{name}-" for name in names)
    return {wheel: data for wheel, data in wheels.items() if wheel.startswith(starts)}


def _kept(folder: int) -> Dict[str, bytes]:
    """Return the wheels of earlier jobs by name; none if another user could change one, and no hard links."""
    try:
        known = [name for name, facts in owned_names(folder, _WHEEL) if facts.st_nlink == 1]
        return {name: read_at(folder, name) for name in known}
    except OSError:
        return {}  # downloaded again


def _downloaded(target: Target, kept: int, path: str, names: Sequence[str]) -> Dict[str, bytes]:
    """Download wheels to a temporary directory in the folder `path` with the descriptor `kept`."""
    if not names:
        return {}
    fresh = new_folder(kept, ".new-")
    try:
        _download(target, os.path.join(path, fresh), names)  # noqa: PTH118
        wheels: Dict[str, bytes] = {}
        with inner_folder(kept, fresh, None) as folder:
            for name in sorted(name for name, _ in owned_names(folder, _WHEEL)):
                with open(open_at(folder, name), "rb") as file:  # pip made it with the user's umask
                    wheels[name] = file.read()
        return wheels
    finally:
        remove(kept, fresh)


def _download(target: Target, folder: str, names: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            download_argv(target, folder, names), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=DOWNLOAD_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--provision: pip did not download {' and '.join(names)} within {DOWNLOAD_LIMIT_S:g} s."
        ) from None
    if done.returncode:
        said = last_lines(done.stderr.decode("utf-8", "replace"))
        raise ConfigError(
            f"--provision: pip found no wheels of {' and '.join(names)} for Python {target.version} on "
            f"{target.machine} with glibc {target.glibc} ({said}). Install them there by hand."
        )


def _package(wheels: Mapping[str, bytes]) -> Package:
    files: Dict[str, bytes] = {}
    for _, data in sorted(wheels.items()):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and "/tests/" not in name]
            files.update((name, archive.read(name)) for name in names)
    names_text = ", ".join(" ".join(wheel.split("-")[:2]) for wheel in sorted(wheels))
    return Package(names_text, files)
