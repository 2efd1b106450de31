"""Where the ringcomm on this machine was installed from, so that other hosts can be given the same.

No package index has ringcomm: ``pip install ringcomm`` would install whatever is registered there under
that name.
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
    """The folder with the sources, or the wheel, that ringcomm comes from here; None if neither is there."""
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
    """The path in what pip notes about a package that comes from no index (PEP 610)."""
    try:
        url = urlparse(json.loads(recorded or "{}")["url"])
    except (ValueError, KeyError, TypeError):
        return None
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None


def how_to_install(source: Optional[Path], version: str, host: str, python: str, is_local: bool) -> str:
    """What to do so that a host has the ringcomm that is here. Pure, but for a look at ``source``.

    Args:
        source: what :func:`find_source` found.
        version: of ringcomm here.
        host: the host's name, as ssh takes it.
        python: the interpreter over there.
    """
    pip = f"{shlex.quote(python)} -m pip install"
    if source is None:
        wheel = f"./ringcomm-{version}-py3-none-any.whl"
        copy = "" if is_local else f"`scp {wheel} {host}:`, and there "
        return f"Install the wheel that was installed here: {copy}`{pip} {wheel}`."
    if is_local:
        return f"Install the one that is here: `{pip} {shlex.quote(str(source))}`."
    path, name = shlex.quote(str(source)), shlex.quote(f"./{source.name}")
    copy = f"rsync -a --exclude '.venv*' {path} {host}:" if source.is_dir() else f"scp {path} {host}:"
    return f"Copy the one that is here: `{copy}`. Then install it there: `{pip} {name}`."


def install_for(host: HostJob) -> Callable[[str], str]:
    """For a host, a function from its interpreter to :func:`how_to_install`."""
    from ringcomm.version import __version__

    target = host.planned.spec.target
    return lambda python: how_to_install(find_source(), __version__, target, python, host.is_local)
