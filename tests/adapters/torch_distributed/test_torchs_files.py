"""A part of PyTorch's own tests of pipelines, DTensor and FSDP2; ``torchs_files.py`` runs more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

PROGRAM = Path(__file__).with_name("torchs_files.py")
SELECTION = {
    "pipelining/test_schedule_multiproc.py::*_tracer_*": 4,
    "pipelining/test_schedule_multiproc.py::*shape_inference_True": 2,
    "pipelining/test_schedule_multiproc.py::*zero_bubble*": 2,
    "tensor/parallel/test_tp_style.py": 9,
    "_tensor/test_embedding_ops.py": 4,
    "_composable/fsdp/test_fully_shard_training.py::*single_group*": 2,
    "_composable/fsdp/test_fully_shard_extensions.py": 1,
    "_composable/fsdp/test_fully_shard_comm.py::test_manual_reshard*": 1,
    "checkpoint/test_file_system_checkpoint_cpu.py": 10,
    "test_c10d_functional_native.py::test_all_gather_into_tensor*": 2,
    "test_functional_api.py::*": 6,
}
"""How many of them pass over Gloo; the others are skipped."""


@pytest.fixture(scope="module")
def tree() -> Path:
    """The folder with the tests, which are fetched."""
    sys.path.insert(0, str(PROGRAM.parent))
    import torchs_files

    try:
        return torchs_files.tree()
    except torchs_files.CannotFetch as reason:
        pytest.skip(f"PyTorch's tests cannot be had: {reason}")


@pytest.mark.release
@pytest.mark.xdist_group("torchs_files")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", SELECTION)
def test_what_passes_over_gloo(tree: Path, part: str) -> None:
    command = [sys.executable, str(PROGRAM), "--tree", str(tree), part]
    done = subprocess.run(command, text=True, timeout=390, capture_output=True)
    found = re.search(r"^(\d+) passed, \d+ skipped, (\d+) failed$", done.stdout, re.MULTILINE)
    assert found and found.groups() == (str(SELECTION[part]), "0"), done.stdout + done.stderr
