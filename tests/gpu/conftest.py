"""These tests need a CUDA device; without one they are not collected. `bash tests/run.sh --gpu` runs them."""

from __future__ import annotations

from pathlib import Path

DEVICES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg")

collect_ignore_glob = [] if any(Path(device).exists() for device in DEVICES) else ["test_*.py"]
