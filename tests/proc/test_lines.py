"""One rank makes a call more than the others, of the same shape: from there on the wrong calls meet."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from tests.proc.test_ringrun_support import ringrun

CALLS = """
import numpy as np
import ringcomm as rc

rc.init()
for step in range(4):
    loss = rc.allreduce(np.ones(3))
    if rc.rank() == 1 and step == 1:
        rc.allreduce(np.ones(3))  # one more
    last = rc.allreduce(np.full(3, 100.0))
"""
ADAPTERS = """
import torch
import ringcomm.torch as hvd

hvd.init()
for step in range(4):
    loss = hvd.allreduce(torch.ones(3))
    if hvd.rank() == 1 and step == 1:
        hvd.allreduce(torch.ones(3))  # one more
    last = hvd.allreduce(torch.full((3,), 100.0))
"""
GROUPS = """
import torch
import torch.distributed as dist
import ringcomm.torch.distributed

dist.init_process_group("ringcomm")
for step in range(4):
    loss = torch.ones(3)
    dist.all_reduce(loss)
    if dist.get_rank() == 1 and step == 1:
        dist.all_reduce(torch.ones(3))  # one more
    last = torch.full((3,), 100.0)
    dist.all_reduce(last)
"""
MEANT = """
import numpy as np
import ringcomm as rc

rc.init()
for step in range(3):
    if rc.rank() == 0:
        x = rc.broadcast(np.ones(3), 0)
    else:
        x = rc.broadcast(np.zeros(3), 0)
    if rc.rank() != 0:
        rc.barrier()
    if rc.rank() == 0:
        rc.barrier()
    y = rc.allreduce(x)
    assert x[0] == y[0] == 1
"""


def lines_of(program: str, *words: str) -> List[int]:
    """The numbers of the lines of a program in which these words stand."""
    lines = program.splitlines()
    return [next(number for number, line in enumerate(lines, 1) if word in line) for word in words]


@pytest.mark.parametrize(
    "program",
    [CALLS, *(pytest.param(program, marks=pytest.mark.release) for program in (ADAPTERS, GROUPS))],
    ids=["calls", "adapters", "groups"],
)
def test_one_call_more(program: str, tmp_path: Path) -> None:
    if program is not CALLS:
        pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(program)
    one_more, last = lines_of(program, "one more", "last)" if program is GROUPS else "last = ")
    done = ringrun("-np", "2", "--timeout", "20", "train.py", cwd=tmp_path)
    both = f"different lines of the program: rank 0 at train.py:{last}, rank 1 at train.py:{one_more}."
    assert (done.out + done.err).count(f"{both} If one rank makes a call more") == 1, done.err
    assert done.process.returncode != 0
    title, first = done.err[done.err.index("╭─") :].splitlines()[:2]
    assert title.endswith("rank 0 has ended while rank 1 still waits for it")
    assert first.startswith("│ Call number 4, allreduce(") and first.endswith(both), done.err
    assert ringrun("diagnose", str(done.records)).out.splitlines()[0] == first[2:]


def test_lines_that_belong_together_are_one_warning(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEANT)
    first, second = lines_of(MEANT, "np.ones(3), 0", "np.zeros(3), 0")
    done = ringrun("-np", "3", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0
    assert done.err.count("comes from different lines") == 1
    assert f"train.py:{first}" in done.err and f"train.py:{second}" in done.err
