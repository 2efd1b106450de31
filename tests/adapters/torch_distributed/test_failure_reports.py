"""The reports of ringrun when a job with process groups fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[3]
START = """
import atexit
import sys
import time
import torch
import torch.distributed as dist
import ringcomm.torch.distributed

if "slowly" in sys.argv:
    atexit.register(time.sleep, 4.0)  # after all that others have registered since
dist.init_process_group("ringcomm")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
"""


def told(folder, ranks, program, *options, ok=False, slowly=False):
    """The launcher's stderr; the program is ``train.py``, and fails unless it is to be ``ok``."""
    arguments = ["slowly"] if slowly else []
    (folder / "train.py").write_text(START + program)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.update(PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}", OMP_NUM_THREADS="1", TMPDIR=str(folder))
    launcher = [sys.executable, "-m", "ringrun", "-np", str(ranks), "--threads", "none"]
    command = [*launcher, *options, "train.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    assert (done.returncode == 0) is ok, done.stderr
    return done.stderr


def test_one_rank_writes_a_timeline_too(tmp_path):
    assert told(tmp_path, 1, "", "--timeline", "trace.json", ok=True) == ""
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())]
    assert names.count("ALLREDUCE") == 1


@pytest.mark.parametrize(
    ("end", "title", "where"),
    [
        (
            "raise ValueError('bad sample')",
            "rank 1 on localhost failed first: exit code 1",
            "ended with an uncaught ValueError: bad sample",
        ),
        (
            "sys.exit(0)",
            "rank 1 has ended while ranks 0, 2 still wait for it",
            "has ended with exit code 0, before the operation in which others wait",
        ),
    ],
)
def test_the_first_failure_is_named_although_others_end_sooner(tmp_path, end, title, where):
    program = f"""
if rank == 1:
    class Heavy:
        def __del__(self, sleep=time.sleep):
            sleep(4.0)  # after it has left

    heavy = Heavy()
    {end}
dist.all_reduce(torch.ones(4))
"""
    text = told(tmp_path, 3, program)
    assert f"╭─ ringrun: {title}\n" in text
    # What follows depends on which ranks had ended when all were asked what they were doing.
    causes, stopped, _ = text.partition("│ Ranks 0, 2 stopped because of it.\n")
    assert stopped and "PeerLostError" not in causes, text
    if end == "sys.exit(0)":
        assert "│ rank 1 (localhost) has finished (its program ended) while others were in " in text
    site = f"train.py:{len(START.splitlines())}"
    assert f"│ Rank 1 (localhost) {where}; its last operation was allreduce (op 1, {site}).\n" in text


IN_A_BACKWARD_PASS = """
other = dist.new_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(5):
    if rank == 1 and step == 3:
        raise ValueError("bad sample")
    model(torch.ones(2, 4)).sum().backward()
"""


def test_the_first_failure_is_named_although_pytorch_wraps_the_others(tmp_path):
    text = told(tmp_path, 3, IN_A_BACKWARD_PASS)
    assert text.count("╭─ ringrun: rank 1 on localhost failed first: exit code 1\n") == 1, text
    assert "│ ValueError: bad sample\n" in text and "│ Ranks 0, 2 stopped because of it.\n" in text, text


GROUPS = """
group = dist.new_group([0, 1, 2])
if rank == 3:
    open("waits", "w").close()
else:
    import os
    while not os.path.exists("waits"):
        time.sleep(0.01)
    time.sleep(0.5)  # for rank 3 to come to where it waits
    dist.all_reduce(torch.ones(3 if rank == 1 else 4), group=group)
dist.barrier()
"""


def test_a_mismatch_in_a_group_is_no_fault_of_others(tmp_path):
    text = told(tmp_path, 4, GROUPS)
    lines = [line[2:] for line in text.splitlines()]
    (waits,) = [line for line in lines if " waits in " in line or " wait in " in line]
    assert waits.startswith("Rank 3 (localhost) waits in barrier (op 2, train.py:")
    assert "Rank 3 waits for ranks 0-2." in lines
    assert "Rank 3 stopped because of it." in lines
    (dispute,) = [line for line in lines if "another call than" in line]
    assert dispute.startswith("Rank 1 makes another call than ranks 0, 2 in the group of ranks 0-2: allr")


@pytest.mark.parametrize("slowly", [False, True])
def test_a_mismatch_once_and_without_pytorchs_prefix(tmp_path, slowly):
    text = told(tmp_path, 3, "dist.all_reduce(torch.ones(3 if rank == 1 else 4))", slowly=slowly)
    assert text.startswith("╭─ ringrun: the ranks do not make the same calls\n│ Traceback (most recent ")
    assert text.count("Traceback") == 1 and text.count("The ranks do not make the same call.") == 1
    assert "[rank" not in text
