"""How a job ends counts, and nothing of what it wrote down is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

SLOW = """
import atexit, sys, time
import numpy as np
import ringcomm as rc

rc.init()
atexit.register(time.sleep, 4.0)  # as frameworks do that have much to put away
rc.allreduce(np.ones(2))
if rc.rank() == 1:
    sys.exit(3)
rc.allreduce(np.ones(2))
"""

WRITTEN = """
import numpy as np
import ringcomm as rc

rc.init()
for step in range(50):
    rc.allreduce_async_(np.ones(10), name=f"grad{step}").wait()
"""


EARLY = """
import os, sys, time
import numpy as np
import ringcomm as rc

class Heavy:
    def __del__(self, sleep=time.sleep):
        sleep(3.0)  # no thread runs any more when this is called

heavy = Heavy()
rc.init()
rc.allreduce(np.ones(2), name="metric")
if rc.rank() == 1:
    os._exit(0) if sys.argv[1] == "at once" else sys.exit(0)
rc.allreduce(np.ones(2))
"""


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("slowly",
         "Rank 1 (localhost) has ended with exit code 0, before the operation in which others wait; its "
         "last operation was allreduce `metric` (op 1, early.py:12)."),
        pytest.param(
            "at once", "Rank 1 (localhost) ended with exit code 0 and left nothing behind.",
            marks=pytest.mark.release,
        ),
    ],
)  # fmt: skip
def test_a_rank_that_ends_too_early_is_reported_as_ended(tmp_path: Path, way: str, sentence: str) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    done = ringrun("-np", "2", "early.py", way, cwd=tmp_path)
    assert done.process.returncode == 255
    assert f"│ {sentence}\n" in done.err, done.err
    assert "│ Rank 0 waits for rank 1.\n" in done.err, done.err


KILLED = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc

rc.init()
x = np.ones((4, 5), np.float32)
for step in range(20):
    if rc.rank() == 2:
        time.sleep(0.1)  # so that others, whenever they are asked, are in this call
    rc.allreduce_(x, name="before")
if rc.rank() == 2:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
rc.allreduce_(x, name="then") if sys.argv[1] == "calls" else rc.allreduce_async_(x, name="then").wait()
"""


@pytest.mark.parametrize(
    ("channel", "call"),
    [
        ("calls", "allreduce(shape (4, 5), float32, op=Average, name='then'), call number 21"),
        pytest.param(
            "engine", "allreduce(shape (4, 5), float32, op=Average) 'then'", marks=pytest.mark.release
        ),
    ],
)
def test_the_call_in_which_a_rank_was_lost_is_named(tmp_path: Path, channel: str, call: str) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    done = ringrun("-np", "3", "--dead-after", "6", "killed.py", channel, cwd=tmp_path)
    # On a busy machine its end may be known, and judged, before any of the others has reported.
    lost = r"rank 2 \(localhost\) was lost(?: while others were in (.*))?: killed by SIGKILL"
    calls = re.findall(lost, done.err)
    assert calls and set(calls) <= {"", call}, done.err


@pytest.mark.release
def test_a_rank_that_takes_long_to_end_still_has_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    done = ringrun("-np", "2", "slow.py", cwd=tmp_path)
    assert done.process.returncode == 3, done.err
    assert "rank 1 on localhost failed first: exit code 3" in done.err


def test_a_timeline_of_the_whole_job_has_its_end_and_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text(WRITTEN)
    done = ringrun("-np", "3", "--timeline", "trace.json", "written.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    events = json.loads((tmp_path / "trace.json").read_text())
    ran = Counter(event["tid"] for event in events if event["ph"] == "B" and event["name"] == "ALLREDUCE")
    assert ran == {0: 50, 1: 50, 2: 50}
