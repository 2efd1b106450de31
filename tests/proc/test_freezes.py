"""A process that is stopped and continues within the time limit does not fail the job, in any operation."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched, wait_for_files

DEAD_AFTER_S = 3.0

TRAIN = """
import os, sys, time
from pathlib import Path
import numpy as np
import ringcomm as rc

phase, until = sys.argv[1], Path("over")
rc.init()
ones = np.ones(1_000_000, np.float32)
Path(f"pid{rc.rank()}").with_suffix(".part").write_text(str(os.getpid()))
Path(f"pid{rc.rank()}").with_suffix(".part").rename(f"pid{rc.rank()}")
going, calls = True, 0
while going:
    if phase == "idle":
        time.sleep(0.5)
    elif phase == "named":
        assert rc.synchronize(rc.allreduce_async(ones, op=rc.Sum, name="ones"))[0] == rc.size()
    else:
        assert rc.allreduce(ones, rc.Sum)[-1] == rc.size()
    calls += 1
    going = bool(rc.broadcast(np.array([not until.exists()]), 0)[0])
print("calls", calls)
"""


@pytest.mark.parametrize(
    ("phase", "links"),
    [("direct", "tcp"), ("named", "auto"), pytest.param("idle", "auto", marks=pytest.mark.release)],
)
@pytest.mark.full
def test_stopped_and_continued_in_time(tmp_path: Path, phase: str, links: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"RINGCOMM_TRANSPORT": links}
    options = ["--dead-after", str(DEAD_AFTER_S), "-np", "3"]
    job = Launched(*options, "train.py", phase, cwd=tmp_path, env=env)
    files = [tmp_path / f"pid{rank}" for rank in range(3)]
    wait_for_files(files)
    for file in files[:2]:
        pid = int(file.read_text())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(DEAD_AFTER_S * 0.5)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    (tmp_path / "over").touch()
    assert job.finish() == 0, job.err
    assert len({line.split("]")[1] for line in job.out.splitlines() if "calls" in line}) == 1, job.out
