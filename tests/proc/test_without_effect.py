"""Jobs with options for optimizers, of programs with and without one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import List

import pytest

from tests.proc.test_ringrun_support import Launched

NUMPY = "import numpy as np, ringcomm as rc\nrc.init()\nrc.allreduce(np.ones(3))\n"
OPTIMIZER = """
import torch
import ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
"""
PROCESS_GROUP = """
import torch, torch.distributed as dist
import ringcomm.torch.distributed
dist.init_process_group("ringcomm")
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("program", "options", "lines"),
    [
        (NUMPY, ["--compress", "int8", "--local-steps", "auto"],
         ["--compress int8 had no effect: ", "--local-steps auto had no effect: "]),
        (OPTIMIZER, ["--compress", "int8", "--local-steps", "4"], []),
        pytest.param(
            PROCESS_GROUP, ["--compress", "auto"], ["--compress auto had no effect: "],
            marks=pytest.mark.release,
        ),
    ],
)  # fmt: skip
def test_an_option_that_no_optimizer_follows(
    tmp_path: Path, program: str, options: List[str], lines: List[str]
) -> None:
    if "torch" in program:
        pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(program)
    done = Launched("-np", "2", *options, "--python", sys.executable, "train.py", cwd=tmp_path)
    done.finish(180.0)
    assert done.process.returncode == 0, done.err
    said = [line for line in done.err.splitlines() if "had no effect" in line]
    assert len(said) == len(lines), done.err
    for line, start in zip(said, lines):
        assert re.match(rf"(ringrun: |\[localhost:0\] ){start}", line), line
