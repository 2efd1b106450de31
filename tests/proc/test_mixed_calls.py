"""Direct calls against calls by name: a deadlock is found in seconds, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

HEAD = """
import time
import numpy as np
import ringcomm as rc

rc.init()
rank, x = rc.rank(), np.ones(4, np.float32)
pair = rc.add_process_set([0, 1])
others = rc.add_process_set([1, 2])

def by_name(name, **more):
    return rc.allreduce_async(x, name=name, op=rc.Sum, **more).wait()[0]

rc.allreduce(x)
"""

DEADLOCKS = {
    "one rank calls by name": "by_name('a') if rank == 1 else rc.allreduce(x)",
    "rank 0 calls by name": "by_name('a') if rank == 0 else rc.barrier()",
    "the root of a broadcast": "by_name('a') if rank == 2 else rc.broadcast(x, 2)",
    "a rank computes meanwhile": """
if rank == 2:
    time.sleep(30)
elif rank == 0:
    by_name("a", process_set=pair)
rc.allreduce(x)
""",
    "after an error that was caught": """
try:
    rc.allreduce(x if rank else "text")
except rc.UnsupportedDtypeError:
    by_name("a")
""",
}

RIGHT = {
    "a rank that comes late": """
if rank:
    by_name("others", process_set=others)
    time.sleep(3)
rc.allreduce(x)
""",
    "two of three meet first": """
if rank == 2:
    time.sleep(3)
if rank:
    by_name("others", process_set=others)
rc.allreduce(x)
""",
    "a rank that computes after a long call": """
if rank == 1:
    time.sleep(3)
rc.barrier()
if rank == 0:
    time.sleep(3)
by_name("a")
""",
    "a thread calls by name while the main thread is in a direct call": """
import threading
if rank == 0:
    def later():
        time.sleep(3)
        by_name("a")
    threading.Thread(target=later).start()
else:
    by_name("a")
rc.allreduce(x)
""",
}


def start(folder: Path, body: str):
    (folder / "train.py").write_text(HEAD + body + "\nprint('done')\n")
    return ringrun("-np", "3", "--dead-after", "6", "--threads", "none", "train.py", cwd=folder)


@pytest.mark.full
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", list(DEADLOCKS))
def test_a_deadlock_ends_the_job_and_names_both_calls(tmp_path: Path, kind: str) -> None:
    done = start(tmp_path, DEADLOCKS[kind])
    assert done.process.returncode == 1, done.err
    assert "│ Mismatched calls: " in done.err and "'a' at " in done.err, done.err
    assert "which returns the result itself" in done.err and "done" not in done.out, done.err


@pytest.mark.full
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", list(RIGHT))
def test_programs_in_which_ranks_are_late_are_right(tmp_path: Path, kind: str) -> None:
    done = start(tmp_path, RIGHT[kind])
    assert done.process.returncode == 0 and done.out.count("done") == 3, done.err
