"""Under PyTorch's process groups, too, the report has steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import Launched

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ringcomm.torch.distributed

dist.init_process_group("ringcomm")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_the_report_has_the_steps_of_the_optimizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    job = Launched("-np", "2", "--report", "run.html", "train.py", cwd=tmp_path)
    assert job.finish(90) == 0, job.err
    rows = re.findall(r"<tr[^>]*><td>(\d)</td><td class=.t.>localhost</td><td>(\d+)</td>",
                      (tmp_path / "run.html").read_text())  # fmt: skip
    assert rows == [("0", "7"), ("1", "7")], job.err
