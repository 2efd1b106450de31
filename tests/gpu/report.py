"""Prints the CUDA devices and the libraries that see them, for `tests/run.sh --gpu`; exit code 1 without."""

from __future__ import annotations

import importlib
import sys


def found() -> list:
    """A line for each library that sees a CUDA device."""
    lines = []
    try:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            lines.append(f"torch {torch.__version__}: {torch.cuda.device_count()} device(s), {name}")
    except ImportError:
        pass
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        lines.append(f"cupy {cupy.__version__}: {count} device(s), {name}")
    except (ImportError, RuntimeError):
        pass
    return lines


if __name__ == "__main__":
    for line in found():
        print(line)
    sys.exit(not found())
