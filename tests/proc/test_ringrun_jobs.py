"""ringrun and ringcomm together: the root cause that is reported when a rank of a job fails."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

TRAIN = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc

rc.init()
for step in range(100000):
    if step == 5 and rc.rank() == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raises":
            raise ValueError("its own fault")
        if sys.argv[1] == "leaves":
            sys.exit(0)
        if sys.argv[1] == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
    rc.allreduce(np.ones(1000))
"""


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("killed", 137, ["rank 1 on localhost failed first: killed by SIGKILL"]),
        ("raises", 1, ["rank 1 on localhost failed first: exit code 1", "│ ValueError: its own fault"]),
        ("leaves", 255, ["rank 1 has ended while ranks 0, 2 still wait for it", "exit code 0"]),
        ("frozen", 255, ["rank 1 on localhost held up the others: still running, ended by ringrun with"]),
    ],
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, way: str, code: int, words: list[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = ringrun("-np", "3", "--dead-after", "3", "train.py", way, cwd=tmp_path)
    assert done.process.returncode == code, done.err
    for word in ["Ranks 0, 2 stopped because of it.", *words]:
        assert word in done.err
    assert done.err.count("╭") == 1
    # The other ranks' tracebacks only repeat it, and are not shown.
    assert "PeerLostError" not in done.err and "PeerStalledError" not in done.err


@pytest.mark.release
def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "import ringcomm as rc\n"
        "time.sleep(60) if os.environ['RINGCOMM_SLOT'] == '0:1' else rc.init()\n"
    )
    done = ringrun("-np", "2", "--start-timeout", "4", "train.py", cwd=tmp_path)
    assert done.process.returncode == 255, done.err
    assert "rank 1 on localhost held up the others: still running" in done.err
    assert "1 of 2 ranks" in done.err and "--start-timeout" in done.err


def test_verbose_shows_the_links(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import ringcomm as rc\nrc.init()\nprint(rc.rank())\n")
    done = ringrun("-np", "2", "--verbose", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "ringrun: rank 0 runs on localhost as process" in done.err
    assert "rank 0 (localhost)" in done.err and "<->" in done.err
    assert "rank 0 exchanges data through" in done.err


BUG = """
import pathlib, time
import ringcomm as rc

rc.init()
rc.barrier()
pathlib.Path(f"after.{rc.rank()}").touch()
while len(list(pathlib.Path().glob("after.*"))) < rc.size():
    time.sleep(0.01)
print(undefined)
"""


def test_ranks_with_the_same_bug_are_no_victims_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BUG)
    done = ringrun("-np", "2", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    assert re.search(r"│ Rank [01] failed with the same error\.\n", done.err), done.err
    assert "stopped because of it" not in done.err


def test_ranks_can_be_bound_to_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    program = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = ringrun("-np", "2", "-bind-to", "core", "--tag-output", "python", "-c", program)
    assert done.process.returncode == 0, done.err
    rows = [set(json.loads(line.split("] ", 1)[1])) for line in done.out.splitlines()]
    assert len(rows) == 2 and not rows[0] & rows[1]
