"""A job that waits for its program to do something leaves the processor to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

PROGRAM = """
import sys, time
import numpy as np
import ringcomm as rc

rc.init()
rc.allreduce_async(np.ones(1000), name="x").wait()  # the engine has had something to do
rc.allreduce(np.ones(1000))
time.sleep(0.5)
began_s, used_s = time.perf_counter(), time.process_time()
time.sleep(4.0)
print(f"USED {(time.process_time() - used_s) / (time.perf_counter() - began_s):.5f}")
"""


@pytest.mark.parametrize("links", [pytest.param("tcp", marks=pytest.mark.release), "auto"])
@pytest.mark.full
def test_an_idle_rank_uses_less_than_a_hundredth_of_a_core(tmp_path: Path, links: str) -> None:
    (tmp_path / "idle.py").write_text(PROGRAM)
    done = ringrun("-np", "3", "--transport", links, "--dead-after", "3", "idle.py", cwd=tmp_path)
    used = [float(share) for share in re.findall(r"USED (\S+)", done.out)]
    assert done.process.returncode == 0 and len(used) == 3, done.err
    assert max(used) < 0.01, used
