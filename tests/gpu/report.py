"""Prints the CUDA devices and the libraries that see them, for `tests/run.sh --gpu`; exit code 1 without.

With `--driver` it only looks for the files of a driver, which needs no library.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

DEVICES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")


def has_device() -> bool:
    """Return whether a driver for CUDA devices runs here."""
    return any(Path(device).exists() for device in DEVICES)


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
    if "--driver" in sys.argv:
        sys.exit(not has_device())
    for line in found():
        print(line)
    sys.exit(not found())
