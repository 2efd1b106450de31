"""ringcomm.torch, between real processes: collectives, errors and training, on several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ringcomm as rc
from tests.adapters.jobs import check_a_lost_rank

pytest.importorskip("torch")

from tests.adapters.torch.harness import run_on  # noqa: E402 - it needs torch

SUBJECTS = """
    collectives state training balanced horovod local_steps compression
"""


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.release) for ranks in (1, 4))])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    """In one job: starting one takes seconds."""
    run_on(ranks, *(f"tests.adapters.torch.checks_{subject}" for subject in SUBJECTS.split()))


def step_of_thirty_layers() -> Any:
    """A function that makes a training step; of each layer the gradients are reduced by themselves."""
    import torch

    import ringcomm.torch as hvd

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(30)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), groups=30)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()

    return step


def test_a_lost_rank_is_the_same_recoverable_error_for_all_others(tmp_path: Path) -> None:
    check_a_lost_rank(step_of_thirty_layers, tmp_path)


def train_deep(trace: str) -> None:
    """One step of six large layers, written down."""
    import torch

    import ringcomm.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1200, 1200) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    for step in range(3):
        if step == 2:
            hvd.barrier()
            hvd.start_timeline(trace)
        optimizer.zero_grad()
        model(torch.ones(500, 1200)).square().mean().backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()


@pytest.mark.release
def test_the_timeline_shows_gradients_travel_during_the_backward_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rc.run(train_deep, (str(path),), np=2, env={"OMP_NUM_THREADS": "1"}, settings={"fusion_threshold": "1M"})
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}

    def first(tensor: str, kind: str) -> float:
        found = [
            event["ts"]
            for event in events
            if event["ph"] == "B" and event["name"].startswith(kind) and names[event["pid"]].endswith(tensor)
        ]
        return min(found)

    # The last layer's gradient is there first, and is reduced before the first layer's is even submitted.
    assert first("5.bias", "ALLREDUCE") < first("0.weight", "NEGOTIATE")
