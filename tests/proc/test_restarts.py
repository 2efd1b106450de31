"""``ringrun --restarts``: the whole job again, from the user's checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched, ringrun

TRAIN = """
import os, pathlib, sys
import numpy as np
import ringcomm as rc

rc.init()
attempt = int(os.environ["RINGCOMM_RESTART"])
saved = pathlib.Path("checkpoint")
start = int(saved.read_text()) if saved.exists() else 0
for step in range(start, 9):
    assert rc.allreduce(np.ones(3), op=rc.Sum)[0] == rc.size()
    if rc.rank() == 0:
        saved.write_text(str(step + 1))
    rc.barrier()
    if step == 3 * attempt + 2 and attempt < 2 and rc.rank() == 1:
        sys.exit(int(sys.argv[1]))
print("attempt", attempt, "from step", start)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.full
def test_it_goes_on_from_the_checkpoint(folder: Path) -> None:
    done = ringrun("-np", "2", "--restarts", "3", "--output-dir", "logs", "train.py", "5", cwd=folder)
    assert done.process.returncode == 0, done.err
    assert done.out.count("attempt 2 from step 6") == 2
    assert done.err.count("rank 1 on localhost failed first: exit code 5") == 2
    assert "ringrun: attempt 1 of 4 has failed; the next one starts in 1 s (--restarts 3)." in done.err
    assert "ringrun: attempt 2 of 4 has failed; the next one starts in 2 s (--restarts 3)." in done.err
    assert (folder / "logs" / "attempt.2" / "rank.0" / "stdout").read_text() == "attempt 2 from step 6\n"


@pytest.mark.release
def test_ctrl_c_between_attempts(folder: Path) -> None:
    launched = Launched("-np", "2", "--restarts", "9", "train.py", "5", cwd=folder)
    assert launched.process.stderr is not None
    read = b""
    while b"next one starts in 2 s" not in read:
        read += os.read(launched.process.stderr.fileno(), 65536)
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.finish() == 130
