"""The source of this machine's installation of ringcomm, for instructions to install it on other hosts.

No package index has ringcomm: ``pip install ringcomm`` would install an unrelated package of that name.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Callable, Optional
from urllib.parse import unquote, urlparse

from ..plan.job import HostJob


def find_source() -> Optional[Path]:
    """Return the source folder or wheel from which ringcomm was installed here; None if neither exists."""
    import ringcomm

    folder = Path(str(ringcomm.__file__)).absolute().parent.parent
    if (folder / "pyproject.toml").is_file():
        return folder
    try:
        recorded = distribution("ringcomm").read_text("direct_url.json")
    except PackageNotFoundError:  # found through PYTHONPATH
        recorded = None
    return _recorded_path(recorded)


def _recorded_path(recorded: Optional[str]) -> Optional[Path]:
    """Return the path in pip's record of a package that was not installed from an index (PEP 610)."""
    try:
        url = urlparse(json.loads(recorded or "{}")["url"])
    except (ValueError, KeyError, TypeError):
        return None
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None


def how_to_install(
    source: Optional[Path], version: str, python: str, is_local: bool, copy_line: Callable[[str, bool], str]
) -> str:
    """Return instructions to install this machine's ringcomm (`source`: :func:`find_source`) for an
    interpreter on a host. ``copy_line(path, is_folder)`` makes a command that copies a path to the host's
    home directory, or "". Pure, except for a stat call.
    """
    pip = f"{shlex.quote(python)} -m pip install"
    if source is None:
        wheel = f"./ringcomm-{version}-py3-none-any.whl"
        line = "" if is_local else copy_line(wheel, False)
        copy = f"`{line}`, and there " if line else ""
        return f"Install the wheel that was installed here: {copy}`{pip} {wheel}`."
    if is_local:
        return f"Install this machine's version: `{pip} {shlex.quote(str(source))}`."
    path, name = shlex.quote(str(source)), shlex.quote(f"./{source.name}")
    line = copy_line(path, source.is_dir())
    copy = f": `{line}`" if line else f" there ({path})"
    return f"Copy this machine's version{copy}. Then install it there: `{pip} {name}`."


def install_for(host: HostJob) -> Callable[[str], str]:
    """Return a function that returns :func:`how_to_install` for a host and an interpreter on it."""
    from ringcomm.version import __version__

    def copy_line(path: str, is_folder: bool) -> str:
        return host.reach.copy_line(host.planned.spec, path, is_folder)

    return lambda python: how_to_install(find_source(), __version__, python, host.is_local, copy_line)
