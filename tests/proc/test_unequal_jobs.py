"""Real jobs of ranks that compute for unequal times: the line at the end of them."""

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


@pytest.mark.slow
def test_a_job_of_unequal_ranks_says_what_that_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ringrun("-np", "2", "train.py", "6", "7", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    line = re.search(r"^ringrun: (localhost:0 waited .*)$", done.err, re.MULTILINE)
    assert line, done.err
    found = re.fullmatch(
        r"localhost:0 waited (\d+) % of the time for localhost:1; balanced batches would take (0\.\d\d) of "
        r"the time, without localhost:1 (\d\.\d\d)",
        line.group(1),
    )
    assert found, line.group(1)
    assert int(found.group(1)) > 40


def test_a_job_of_equal_or_short_work_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ringrun("-np", "2", "train.py", "6", "0.2", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "waited" not in done.err
