"""``--check-build``: the frameworks that can be used here, in the form of ``horovodrun --check-build``.

No framework is imported: the module only checks whether it can be found.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

FRAMEWORKS = {
    "TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet", "Keras": "keras", "JAX": "jax",
    "MLX": "mlx", "Lightning": "lightning",
}  # fmt: skip
"""The module of each framework that has an adapter."""


def is_installed(module: str) -> bool:
    """Return whether a module of this name can be found."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has a module of this name without a spec
        return False


def describe_build() -> str:
    """Return the output of ``--check-build``."""
    from ringcomm.version import __version__

    own = "[X] Gloo (replaced by ringcomm's own links over TCP and shared memory)"
    lines = [f"ringcomm v{__version__} (Python {sys.version.split()[0]}, {sys.executable}):", ""]
    lines.append("Available Frameworks:")
    lines += [_line(title, module) for title, module in FRAMEWORKS.items()]
    lines.append(_line("NumPy, and arrays that can be viewed as NumPy arrays", "numpy"))
    lines += ["", "Available Controllers:", "    [ ] MPI", f"    {own}"]
    lines += ["", "Available Tensor Operations:"]
    lines += ["    [ ] NCCL", "    [ ] DDL", "    [ ] CCL", "    [ ] MPI", f"    {own}"]
    return "\n".join(lines) + "\n"


def _line(title: str, module: str) -> str:
    return f"    [X] {title}" if is_installed(module) else f"    [ ] {title} (not installed)"


if __name__ == "__main__":
    sys.stdout.write(describe_build())
