"""What ``--check-build`` shows: which frameworks can be used here, in the form that Horovod's users know.

Nothing is imported for it: it looks whether there is something to import.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import List, NamedTuple


class Framework(NamedTuple):
    """A framework: how it is called, what is imported, and ringcomm's adapter for it."""

    title: str
    module: str
    adapter: str


FRAMEWORKS = (
    Framework("TensorFlow", "tensorflow", "tensorflow"),
    Framework("PyTorch", "torch", "torch"),
    Framework("MXNet", "mxnet", "mxnet"),
    Framework("Keras", "keras", "keras"),
    Framework("JAX", "jax", "jax"),
    Framework("Lightning", "lightning", "lightning"),
)


def is_installed(module: str) -> bool:
    """Whether there is a module of this name to import."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: something put a module without a spec there
        return False


def has_adapter(name: str) -> bool:
    """Whether this version of ringcomm has an adapter of this name."""
    package = find_spec("ringcomm")
    places = [] if package is None else package.submodule_search_locations or []
    return any(
        (Path(at) / name / "__init__.py").exists() or (Path(at) / f"{name}.py").exists() for at in places
    )


def describe_build() -> str:
    """The whole text."""
    from ringcomm.version import __version__

    lines = [f"ringcomm v{__version__} (Python {sys.version.split()[0]}, {sys.executable}):", ""]
    lines.append("Available Frameworks:")
    lines += [_line(item) for item in FRAMEWORKS]
    lines.append(f"    [{_mark(is_installed('numpy'))}] NumPy, and all whose arrays can be seen as NumPy's")
    own = "[X] Gloo (its place is taken by ringcomm's own links over TCP and shared memory)"
    lines += ["", "Available Controllers:", "    [ ] MPI", f"    {own}"]
    lines += ["", "Available Tensor Operations:"]
    lines += ["    [ ] NCCL", "    [ ] DDL", "    [ ] CCL", "    [ ] MPI", f"    {own}"]
    return "\n".join(lines) + "\n"


def _line(item: Framework) -> str:
    installed, adapter = is_installed(item.module), has_adapter(item.adapter)
    lacking: List[str] = []
    if not installed:
        lacking.append("not installed")
    if not adapter:
        lacking.append("no adapter in this version")
    note = f" ({'; '.join(lacking)})" if lacking else ""
    return f"    [{_mark(installed and adapter)}] {item.title}{note}"


def _mark(there: bool) -> str:
    return "X" if there else " "


if __name__ == "__main__":
    sys.stdout.write(describe_build())
