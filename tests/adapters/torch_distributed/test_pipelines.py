"""A pipeline with a stage that stops: the message that the others wait for is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")


from tests.proc.test_ringrun_support import Launched

PROGRAM = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
import ringcomm.torch.distributed

class Stage(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if dist.get_rank() == 1 and way in ("stops", "is-killed") and self.calls == 15:
            if way == "is-killed":
                time.sleep(1.0)  # until the others wait
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for_ever()
        return torch.tanh(super().forward(x))

def wait_for_ever():
    time.sleep(10_000)

way, kind = sys.argv[1:]
dist.init_process_group("ringcomm", timeout=datetime.timedelta(seconds=4))
rank, size = dist.get_rank(), dist.get_world_size()
layer = Stage(64, 64)
stage = pipelining.PipelineStage(layer, rank, size, torch.device("cpu"))
schedule = getattr(pipelining, kind)(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(25):
    optimizer.zero_grad()
    given = [torch.ones(1024, 64)] if rank == 0 else []
    schedule.step(*given, **({"target": torch.zeros(1024, 64)} if rank == size - 1 else {}))
    optimizer.step()
dist.destroy_process_group()
"""
LIMITS = ("--late-after", "20", "--threads", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.release
@pytest.mark.parametrize("way", ["stops", "is-killed"])
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_the_message_is_named(folder: Path, way: str, kind: str) -> None:
    job = Launched("-np", "3", *LIMITS, "train.py", way, kind, cwd=folder)
    assert job.finish(120) != 0
    assert f"rank 1 (localhost) {'is silent' if way == 'stops' else 'was lost'}" in job.err, job.err
    assert "Ranks 0, 2 wait for rank 1.\n" in job.err, job.err
    (number, sent) = re.findall(
        r"Rank 0 \(localhost\) waits for message (\d+) from rank 1 \(65536 bytes of float32, train.py:\d+\)"
        r"(?:, which has sent (\d+))?", job.err
    )[0]  # fmt: skip
    if way == "stops":
        assert int(sent) == int(number) - 1
        assert "its main thread is in wait_for_ever (train.py:" in job.err
    contents = [json.loads((job.records / f"flight.{rank}.json").read_text()) for rank in (0, 2)]
    for content in contents:
        (channel,) = [item for item in content["lanes"] if "messages" in item]
        assert channel["messages"]["1"] and channel["operations"][-1]["peer"] == 1
