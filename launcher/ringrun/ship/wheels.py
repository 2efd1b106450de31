"""The wheels of the packages that ringcomm needs, for hosts that lack them (``--provision``).

They are downloaded on this machine by pip, for the interpreter, the processor and the C library of the host,
and kept for the next job. A wheel is a zip file whose extension modules find their own libraries by relative
paths, so the host only has to unpack it into a directory on the module path: it needs neither pip nor a
virtual environment.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..agent.shipped import places
from .package import Package

NEEDED = ("numpy", "psutil")
DOWNLOAD_LIMIT_S = 120.0
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
    cache = Path(places(os.environ)[0]) if cache is None else cache
    kept = cache / f"wheels-cp{target.version}-{target.machine}-glibc{target.glibc}"
    wheels = sorted(wheel for name in names for wheel in kept.glob(f"{name}-*.whl"))
    lines: List[str] = []
    if not all(any(wheel.name.startswith(f"{name}-") for wheel in wheels) for name in names):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=kept) as folder:
            _download(target, folder, names)
            wheels = [wheel.replace(kept / wheel.name) for wheel in sorted(Path(folder).glob("*.whl"))]
        digests = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
        lines = [f"{wheel.name} (sha256 {digest})" for wheel, digest in zip(wheels, digests)]
    return _package(wheels), lines


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


def _package(wheels: Sequence[Path]) -> Package:
    files: Dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and "/tests/" not in name]
            files.update((name, archive.read(name)) for name in names)
    names_text = ", ".join(" ".join(wheel.name.split("-")[:2]) for wheel in wheels)
    return Package(names_text, files)
