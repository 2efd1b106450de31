"""The wheels of the packages that ringcomm needs, for hosts that lack them (``--provision``).

They are downloaded on this machine by pip, for the interpreter, the processor and the C library of the host,
and kept for the next job. A wheel is a zip file whose extension modules find their own libraries by relative
paths, so the host only has to unpack it into a directory on the module path: it needs neither pip nor a
virtual environment.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError
from ringcomm.files import NotPrivateError, own_folder, read_private, why_untrusted, write_file

from ..agent.shipped import places
from .package import Package

NEEDED = ("numpy", "psutil")
DOWNLOAD_LIMIT_S = 120.0
DIGESTS = "digests.json"
"""The SHA-256 of each wheel, by name. A wheel with another content is downloaded anew."""
MAX_WHEEL_BYTES = 1 << 30
_VERSION, _MACHINE, _GLIBC = r"3\.\d{1,2}", r"[a-z0-9_]{1,20}", r"(\d\.\d{1,3})?"
_OLDEST_GLIBC = 5


class Target(NamedTuple):
    """The interpreter that a wheel is for.

    Attributes:
        version: of CPython, like "3.8".
        machine: as ``uname -m`` prints it.
        glibc: the version of the C library, like "2.31"; "" for another C library.
    """

    version: str
    machine: str
    glibc: str

    @classmethod
    def of(cls, version: Any, machine: Any, glibc: Any) -> Target:
        """The interpreter that a host reports: these become parts of paths and of command lines.

        Raises:
            ConfigError: one of them is not what it should be.
        """
        given = {"Python": version, "processor": machine, "C library": glibc}
        for (what, value), pattern in zip(given.items(), (_VERSION, _MACHINE, _GLIBC)):
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ConfigError(f"--provision: it reports an invalid version of its {what}: {value!r:.80}.")
        return cls(version, machine, glibc)


def platform_tags(target: Target) -> List[str]:
    """The platform tags of the wheels that a host can use, the newest first (PEP 600). Pure.

    Raises:
        ConfigError: the host's C library is not glibc 2.
    """
    major, _, minor = target.glibc.partition(".")
    if major != "2" or not minor.isdigit():
        raise ConfigError(
            f"--provision: the C library of that host is {target.glibc or 'not glibc'}; there are wheels for "
            "glibc only. Install numpy and psutil there with the system's package manager."
        )
    tags = [f"manylinux_2_{number}_{target.machine}" for number in range(int(minor), _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{target.machine}", f"manylinux1_{target.machine}"]


def download_argv(target: Target, folder: str, names: Sequence[str]) -> List[str]:
    """The command line of pip that downloads wheels. Pure."""
    platforms = [word for tag in platform_tags(target) for word in ("--platform", tag)]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", target.version, *platforms,
        "--dest", folder, *names,
    ]  # fmt: skip


def fetch_wheels(
    target: Target, cache: Optional[Path] = None, names: Sequence[str] = NEEDED
) -> Tuple[Package, List[str]]:
    """Download wheels, or take those of an earlier job, and make one package of them.

    Args:
        target: the host's interpreter.
        cache: where wheels are kept; None for this user's cache directory.
        names: the packages.

    Returns:
        The package, and a line for each wheel that was downloaded now, with its name and its SHA-256.

    Raises:
        ConfigError: pip is not usable, or found no wheels for that host.
    """
    cache = trusted_cache(os.environ) if cache is None else cache
    kept = cache / f"wheels-cp{target.version}-{target.machine}-glibc{target.glibc}"
    known = _kept_wheels(kept)
    wheels = _of(names, known)
    lines: List[str] = []
    if not all(_of([name], wheels) for name in names):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=kept) as folder, own_folder(kept) as place:
            _download(target, folder, names)
            wheels = {wheel.name: wheel.read_bytes() for wheel in Path(folder).glob("*.whl")}
            for name, data in wheels.items():
                write_file(place, name, data)
            known.update(wheels)
            digests = {name: hashlib.sha256(data).hexdigest() for name, data in known.items()}
            write_file(place, DIGESTS, json.dumps(digests).encode())
        lines = [f"{name} (sha256 {digests[name]})" for name in sorted(wheels)]
    return _package(wheels), lines


def _of(names: Sequence[str], wheels: Mapping[str, bytes]) -> Dict[str, bytes]:
    """The wheels of some packages."""
    return {
        wheel: data for wheel, data in wheels.items() if wheel.startswith(tuple(f"{name}-" for name in names))
    }


def trusted_cache(environ: Mapping[str, str]) -> Path:
    """The first directory for packages that no other user can write or replace; it is made.

    Raises:
        ConfigError: there is none; the text says why, for each that was tried.
    """
    reasons = []
    for place in map(Path, places(environ)):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = why_untrusted(place)
        except OSError as problem:
            why = problem.strerror or str(problem)
        if not why:
            return place
        reasons.append(f"{place}: {why}")
    raise ConfigError(f"--provision: no directory can hold wheels safely ({'; '.join(reasons)}).")


def _kept_wheels(kept: Path) -> Dict[str, bytes]:
    """The contents of the wheels of earlier jobs that are as they were, by name."""
    wheels: Dict[str, bytes] = {}
    try:
        for name, digest in json.loads(read_private(kept / DIGESTS, 1 << 16)).items():
            data = read_private(kept / Path(name).name, MAX_WHEEL_BYTES, follow=False)
            if hashlib.sha256(data).hexdigest() == digest:
                wheels[name] = data
    except (OSError, NotPrivateError, ValueError, AttributeError, TypeError):
        return {}  # they are downloaded anew
    return wheels


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
        lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines()]
        said = next((line for line in reversed(lines) if line), "nothing")
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
