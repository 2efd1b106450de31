# ruff: noqa: PTH112, PTH118, PTH119, PTH120  text, and links make environments
"""Finds the environment of this machine's interpreter on a host that has it at another path.

A host may have another home, user or folder of conda. So before ``python3`` is used there, ringrun searches
for the environment: a virtual environment at the same path below the home, or one of conda by its name.
"""

from __future__ import annotations

import os
from typing import List, Tuple

from .protocol import BOOT

CONDAS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "micromamba", ".conda")
"""The folders that installers of conda make in the home. Those in ``/opt`` have no dot."""
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
    """Return a line for :data:`.protocol.BOOT` that changes to the environment's interpreter, or b""."""
    name, inside = conda_name(python)
    found = candidates(python, home)
    if not found:
        return b""
    text = _FINDER.format(candidates=found, name=name, inside=inside, boot=BOOT)
    return f"exec({text!r})\n".encode()


def candidates(python: str, home: str) -> List[str]:
    """Return the possible paths of the interpreter on another host; ``~`` is the home there."""
    found: List[str] = []
    if home != "/" and python.startswith(home.rstrip("/") + "/"):
        found.append("~/" + python[len(home.rstrip("/")) + 1 :])
    name, inside = conda_name(python)
    if inside:
        middle = f"envs/{name}/" if name else ""
        found += [f"{root}/{middle}{inside}" for root in _ROOTS]
    return [path for path in found if path != python]


def conda_name(python: str) -> Tuple[str, str]:
    """Return the name of an interpreter's conda environment ("": the base) and its path in it; or two ""."""
    prefix, binary = os.path.split(os.path.dirname(python))
    if binary != "bin" or not os.path.isdir(os.path.join(prefix, "conda-meta")):
        return "", ""
    above, name = os.path.split(prefix)
    inside = f"bin/{os.path.basename(python)}"
    return (name if os.path.basename(above) == "envs" else ""), inside
