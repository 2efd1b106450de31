"""A pipeline with a slow stage, and with one that stops: the bubble and the microbatch are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import InferenceMode

from ringcomm.torch.distributed._pipelines import purpose_of
from ringcomm.torch.distributed._work import RingcommWork
from tests.proc.test_ringrun_support import Launched

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
import ringcomm.torch.distributed

class Stage(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if dist.get_rank() == 1 and way == "slow":
            time.sleep(0.02)
        if dist.get_rank() == 1 and way in ("stops", "is-killed") and self.calls == 15:
            if way == "is-killed":
                time.sleep(1.0)  # until the others wait
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for_ever()
        return torch.tanh(super().forward(x))

def wait_for_ever():
    time.sleep(10_000)

way, kind = sys.argv[1:]
dist.init_process_group("ringcomm")
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
LIMITS = ("--timeout", "4", "--stall-warning", "2", "--threads", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.release
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_watch_and_report_show_which_stage_the_others_wait_for(folder: Path, kind: str) -> None:
    job = Launched("-np", "3", "--watch", "--report", "run.html", "--timeline", "line.json", "--threads", "1",
                   "train.py", "slow", kind, cwd=folder)  # fmt: skip
    assert job.finish(120) == 0, job.err
    (bubbles,) = re.findall(r"bubble: (.*?)(?:;|$)", job.err.replace("\n  ", " "), re.MULTILINE)[-1:]
    first, second = sorted(re.findall(r"rank (\d) waits \d\d % for rank (\d)", bubbles)[:2])
    assert (first, second) == (("0", "1"), ("2", "1")), job.err
    assert "rank 1 (localhost) is the slowest" in job.err
    cells = re.findall(r'<td class="t">(\d+) % for 1[^<]*</td>', (folder / "run.html").read_text())
    assert len(cells) == 2, job.err
    events = json.loads((folder / "line.json").read_text())
    rows = {str(event["args"].get("name")) for event in events if event["ph"] == "M"}
    assert {"group 0: send to rank 1", "group 0: recv from rank 1"} <= rows
    spans = [event["name"] for event in events if event["ph"] == "B" and event.get("name") != "QUEUE"]
    assert spans.count("RECV FROM RANK 1") >= 200  # 25 steps, 4 microbatches, ranks 0 and 2


@pytest.mark.release
@pytest.mark.parametrize("way", ["stops", "is-killed"])
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_the_message_and_the_microbatch_are_named(folder: Path, way: str, kind: str) -> None:
    job = Launched("-np", "3", *LIMITS, "train.py", way, kind, cwd=folder)
    assert job.finish(120) != 0
    assert f"rank 1 (localhost) {'is silent' if way == 'stops' else 'was lost'}" in job.err, job.err
    assert "Ranks 0, 2 wait for rank 1.\n" in job.err, job.err
    # The 15th call of stage 1 is microbatch 3 of the fourth step: rank 0 waits for its first gradients.
    use = "microbatch 1 of 4 for stage 0, 65536 bytes of float32, train.py:"
    (number, sent) = re.findall(
        rf"Rank 0 \(localhost\) waits for message (\d+) from rank 1 \(gradients of {use}\d+\)"
        r"(?:, which has sent (\d+))?", job.err
    )[0]  # fmt: skip
    if way == "stops":
        assert int(sent) == int(number) - 1
        assert "its main thread is in wait_for_ever (train.py:" in job.err
        assert re.search(r"activations of microbatch \d of 4 for stage 2, .* which has sent \d+\.", job.err)
    contents = [json.loads((job.records / f"flight.{rank}.json").read_text()) for rank in (0, 2)]
    for content in contents:
        (channel,) = [item for item in content["lanes"] if "messages" in item]
        assert channel["messages"]["1"] and channel["operations"][-1]["peer"] == 1


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_microbatch_is_found_by_the_tensor_that_receives_it(alone: None) -> None:
    one = torch.ones(2, 6)
    assert purpose_of(RingcommWork("recv", [one])) == ""
    stage = PipelineStage(nn.Linear(6, 6), 1, 3, torch.device("cpu"), input_args=one, output_args=one)
    stage._inference_mode = InferenceMode.STATIC  # what the first step of a schedule finds out
    stage._prepare_forward_infra(4, one)
    places = [stage.args_recv_info[number][0].buffer for number in range(4)]
    found = [purpose_of(RingcommWork("recv", [place])) for place in places]
    assert found == [f"activations of microbatch {number} of 4 for stage 1" for number in range(1, 5)]
    assert purpose_of(RingcommWork("recv", [one])) == ""
