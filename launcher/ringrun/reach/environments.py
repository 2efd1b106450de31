# ruff: noqa: PTH112, PTH118, PTH119, PTH120  text, and links make environments
"""Finds the environment of this machine's interpreter on a host that has it at another path.

A host may have another home, user or folder of conda. So before ``python3`` is used there, its environment is
looked for: a virtual environment at the same path below the home, one of conda by its name.
"""

from __future__ import annotations

import os
from typing import List, Tuple

from .protocol import BOOT

CONDAS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "micromamba", ".conda")
"""The folders that installers of conda make in the home. Those in ``/opt`` are without a dot."""
_ROOTS = (*(f"~/{name}" for name in CONDAS), "/opt/conda", *(f"/opt/{name}" for name in CONDAS[:-1]))

_FINDER = """
import os
found = {candidates!r}
try:
    with open(os.path.expanduser("~/.conda/environments.txt")) as file:
        paths = [line.strip() for line in file.read(1 << 20).splitlines()]
    paths = [path for path in paths if {name!r} and os.path.basename(path) == {name!r}]
    found += [os.path.join(path, {inside!r}) for path in paths]
except (OSError, ValueError):
    pass
for path in map(os.path.expanduser, found):
    if os.path.isabs(path) and os.access(path, os.X_OK) and not os.path.isdir(path):
        os.execv(path, [path, "-c", {boot!r}])
exec(f.readline())
"""


def finder(python: str, home: str) -> bytes:
    """A line for the stdin of :data:`.protocol.BOOT`, before the one that starts the agent.

    It replaces the interpreter that reads it by that of the environment, if the host has one.

    Args:
        python: the path of the interpreter here.
        home: this user's home here.

    Returns:
        The line; b"" if the interpreter is in no environment and not in the home.
    """
    name, inside = conda_name(python)
    found = candidates(python, home)
    if not found:
        return b""
    text = _FINDER.format(candidates=found, name=name, inside=inside, boot=BOOT)
    return f"exec({text!r})\n".encode()


def candidates(python: str, home: str) -> List[str]:
    """Return where the interpreter may be on another host; ``~`` is the home there.

    Args:
        python, home: see :func:`finder`.
    """
    found: List[str] = []
    if home != "/" and python.startswith(home.rstrip("/") + "/"):
        found.append("~/" + python[len(home.rstrip("/")) + 1 :])
    name, inside = conda_name(python)
    if inside:
        middle = f"envs/{name}/" if name else ""
        found += [f"{root}/{middle}{inside}" for root in _ROOTS]
    return [path for path in found if path != python]


def conda_name(python: str) -> Tuple[str, str]:
    """The name of an interpreter's environment of conda ("" for the base) and its path there; or two ""."""
    prefix, binary = os.path.split(os.path.dirname(python))
    if binary != "bin" or not os.path.isdir(os.path.join(prefix, "conda-meta")):
        return "", ""
    above, name = os.path.split(prefix)
    inside = f"bin/{os.path.basename(python)}"
    return (name if os.path.basename(above) == "envs" else ""), inside
