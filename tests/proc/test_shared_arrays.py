"""Arrays of rc.empty where a rank is killed: the others get the error, and nothing remains in /dev/shm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.proc.plain_jobs import run_plain

PROGRAM = """
import os, signal
import numpy as np
import ringcomm as rc
from ringcomm.transport import arena

rc.init()
data = rc.empty(4_000_000)
data.fill(1.0)
rc.allreduce_(data, rc.Sum)
assert (data == 2.0).all() and data in arena.own()
if rc.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        rc.allreduce_(data, rc.Sum)
except rc.PeerLostError as error:
    print("lost", error)
rc.shutdown()
data.fill(5.0)
print("kept", data.sum() / data.size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no such memory")
@pytest.mark.parametrize("transport", ["auto", pytest.param("shm", marks=pytest.mark.release)])
def test_a_killed_rank_leaves_nothing(transport: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    ends = sorted(run_plain(PROGRAM, 2, RINGCOMM_TRANSPORT=transport))
    assert [code for code, _ in ends] == [-9, 0], ends
    assert "lost" in ends[1][1] and "kept 5.0" in ends[1][1]
    assert not set(Path("/dev/shm").iterdir()) - before
