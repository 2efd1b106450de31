"""``--check-build``: the frameworks that can be used here, in the form of ``horovodrun --check-build``.

No framework is imported: the module only checks whether it can be found.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import List, NamedTuple


class Framework(NamedTuple):
    """A framework: its name in the output, its module, and ringcomm's adapter for it."""

    title: str
    module: str
    adapter: str


FRAMEWORKS = (
    Framework("TensorFlow", "tensorflow", "tensorflow"),
    Framework("PyTorch", "torch", "torch"),
    Framework("MXNet", "mxnet", "mxnet"),
    Framework("Keras", "keras", "keras"),
    Framework("JAX", "jax", "jax"),
    Framework("MLX", "mlx", "mlx"),
    Framework("Lightning", "lightning", "lightning"),
)


def is_installed(module: str) -> bool:
    """Return whether a module of this name can be found."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has a module of this name without a spec
        return False


def has_adapter(name: str) -> bool:
    """Return whether this version of ringcomm has an adapter of this name."""
    package = find_spec("ringcomm")
    places = [] if package is None else package.submodule_search_locations or []
    return any(
        (Path(at) / name / "__init__.py").exists() or (Path(at) / f"{name}.py").exists() for at in places
    )


def describe_build() -> str:
    """Return the output of ``--check-build``."""
    from ringcomm.version import __version__

    lines = [f"ringcomm v{__version__} (Python {sys.version.split()[0]}, {sys.executable}):", ""]
    lines.append("Available Frameworks:")
    lines += [_line(item) for item in FRAMEWORKS]
    mark = _mark(is_installed("numpy"))
    lines.append(f"    [{mark}] NumPy, and arrays that can be viewed as NumPy arrays")
    own = "[X] Gloo (replaced by ringcomm's own links over TCP and shared memory)"
    lines += ["", "Available Controllers:", "    [ ] MPI", f"    {own}"]
    lines += ["", "Available Tensor Operations:"]
    lines += ["    [ ] NCCL", "    [ ] DDL", "    [ ] CCL", "    [ ] MPI", f"    {own}"]
    return "\n".join(lines) + "\n"


def _line(item: Framework) -> str:
    installed, adapter = is_installed(item.module), has_adapter(item.adapter)
    missing: List[str] = []
    if not installed:
        missing.append("not installed")
    if not adapter:
        missing.append("no adapter in this version")
    note = f" ({'; '.join(missing)})" if missing else ""
    return f"    [{_mark(installed and adapter)}] {item.title}{note}"


def _mark(is_available: bool) -> str:
    return "X" if is_available else " "


if __name__ == "__main__":
    sys.stdout.write(describe_build())
