"""These tests need a CUDA device; without one they are not collected. `bash tests/run.sh --gpu` runs them."""

from __future__ import annotations

from tests.gpu.report import has_device

collect_ignore_glob = [] if has_device() else ["test_*.py"]
