"""Real jobs of ranks that compute for unequal times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

PROGRAM = """
import os, sys, time
import numpy as np
import ringcomm as rc

rc.init()
matrix, began_s = np.ones((100, 100)), time.perf_counter()
slow = int(sys.argv[1]) if rc.rank() == 1 else 1
for step in range(10000):
    for _ in range(40 * slow):
        matrix = matrix @ matrix
        matrix /= matrix.max()
    rc.allreduce(np.ones(1000))
    if rc.broadcast(np.array([time.perf_counter() - began_s]))[0] > float(sys.argv[2]):
        break
"""

BALANCED = """
import sys
import numpy as np
import ringcomm as rc

rc.init()
matrix, data = np.ones((60, 60)), rc.balanced(960, global_batch=24)
for _ in range(int(sys.argv[1])):
    for mine in data:
        for _ in range(20 * len(mine) * (5 if rc.rank() == 1 else 1)):
            matrix = matrix @ matrix
            matrix /= matrix.max()
        rc.allreduce(np.ones(20000), weight=len(mine))
print("trained", data.state_dict()["epoch"], data.shares, flush=True)
"""


def test_shares_follow_the_speeds_in_a_running_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BALANCED)
    done = ringrun("-np", "2", "train.py", "2", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "localhost:1 is the slowest at step 5: batches 12/12 -> " in done.err
    shares = re.findall(r"trained 2 \((\d+), (\d+)\)", done.out)
    assert len(shares) == 2 and shares[0] == shares[1]
    assert int(shares[0][0]) > int(shares[0][1])


@pytest.mark.release
def test_advice_instead_of_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BALANCED)
    done = ringrun("-np", "2", "--advise", "train.py", "9", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "trained" not in done.out
    assert re.search(r"^ringrun: (use|one machine alone is fastest:) localhost:0", done.err, re.MULTILINE)
    rows = re.findall(r"^ringrun: +[\d.]+ s +[\d.]+ +(float32|bf16|int8|any) ", done.err, re.MULTILINE)
    assert sorted(rows) == ["any", "any", "bf16", "float32", "int8"]


@pytest.mark.release
def test_a_program_that_cannot_be_measured_is_told_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ringrun("-np", "2", "--advise", "train.py", "1", "0.1", cwd=tmp_path)
    assert done.process.returncode == 1, done.err
    assert done.err.count("No advice: ") == 1
    assert "No advice: the program ended before every rank was measured." in done.err
