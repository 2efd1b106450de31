"""`run_python`: run a program of this checkout, or one that a test has written, to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
LIMIT_S = 150.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Ranks outnumber the cores as it is."""


def run_python(
    *arguments: Any, code: int = 0, cwd: Path = ROOT, limit_s: float = LIMIT_S, **variables: str
) -> str:
    """Return Python's output on both streams with these arguments, outside a job of ringcomm; `code` is the
    expected exit code.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, timeout=limit_s, text=True, stdin=subprocess.DEVNULL,
        env={**inherited, "PYTHONPATH": SOURCES, **ONE_THREAD, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout
