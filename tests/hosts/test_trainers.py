"""Programs for PyTorch's trainers on 2+1 ranks of two hosts, started from a third; where installed."""

from __future__ import annotations

import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Sequence

import pytest

from tests.hosts.job import EXAMPLES, ROOT, Job, ringrun
from tests.hosts.netlab import Lab

PROGRAMS = ROOT / "tests" / "adapters" / "trainers"
RECORDED = PROGRAMS / "recorded.py"
UNEQUAL = ["-np", 3, "-H", "jetson1:2,jetson2:1", "-x", "OMP_NUM_THREADS=1", "--start-timeout", 200]
SAMPLES = 1440
COMPOSER = Path(sys.prefix) / "composer" / "composer"
HAS = {
    "lightning_ddp": find_spec("lightning"),
    "fabric_digits": find_spec("lightning"),
    "accelerate_digits": find_spec("accelerate"),
    "transformers_digits": find_spec("transformers"),
    "composer_digits": COMPOSER.exists() or find_spec("composer"),
}
pytestmark = [pytest.mark.release, pytest.mark.timeout(300)]


def run(lab: Lab, example: str, *options: object, more: Sequence[str] = ()) -> Job:
    """An epoch of a program with more of its own options, on three ranks."""
    if not HAS[example]:
        pytest.skip("this trainer is not installed here: bash tests/run.sh --only trainers")
    folder = EXAMPLES if example == "lightning_ddp" else PROGRAMS
    program = [RECORDED, folder / f"{example}.py", "--epochs", 1, *more]
    return ringrun(lab, *UNEQUAL, *options, *program, timeout_s=240)


@pytest.mark.parametrize("example", sorted(HAS))
def test_a_trainer_on_unequal_hosts(lab: Lab, example: str) -> None:
    """All ranks end with the same weights, and together they have read every sample once."""
    job = run(lab, example)
    assert job.process.returncode == 0, job.output
    digests = job.values(r"^\[(?:jetson1:[01]|jetson2:2)\] rank \d: weights have digest ([0-9a-f]{16})")
    assert len(digests) == 3 and len(set(digests)) == 1, job.output
    (reached,) = job.values(r"3 process\(es\) over ringcomm; final accuracy ([\d.]+)")
    assert example == "transformers_digits" or float(reached) > 0.5  # a transformer needs more than one epoch
    read = [json.loads(line) for line in job.values(r"\] read (\[.*\])")]
    assert [len(part) for part in read] == [SAMPLES // 3] * 3
    assert sorted(sum(read, [])) == list(range(SAMPLES))


@pytest.mark.parametrize("example", sorted(HAS))
def test_a_killed_rank_is_named(lab: Lab, example: str) -> None:
    """With Lightning, in a job whose model is sharded with FSDP2."""
    job = run(lab, example, "-x", "KILL_RANK=2", more=["--fsdp2"] if example == "lightning_ddp" else [])
    assert job.process.returncode == 128 + signal.SIGKILL, job.output
    box = job.output.split("╭")[-1]
    assert "rank 2 on jetson2" in box and "SIGKILL" in box, job.output
