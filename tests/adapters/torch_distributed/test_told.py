"""What ringrun tells when a job fails that uses process groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
START = """
import sys
import torch
import torch.distributed as dist
import ringcomm.torch.distributed

dist.init_process_group("ringcomm")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
"""


def told(folder, ranks, program):
    """The launcher's stderr; the program is ``train.py``."""
    (folder / "train.py").write_text(START + program)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.update(PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}", OMP_NUM_THREADS="1", TMPDIR=str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "ringrun", "-np", str(ranks), "train.py"], cwd=folder, env=environ,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    return done.stderr


def test_a_mismatch_once_and_without_pytorchs_prefix(tmp_path):
    text = told(tmp_path, 3, "dist.all_reduce(torch.ones(3 if rank == 1 else 4))")
    assert text.startswith("╭─ ringrun: the ranks do not make the same calls\n│ Traceback (most recent ")
    assert text.count("Traceback") == 1 and text.count("The ranks do not make the same call.") == 1
    assert "[rank" not in text
