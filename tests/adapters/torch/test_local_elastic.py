"""Local steps in elastic jobs: a member that is lost between two exchanges, and one that joins."""

from __future__ import annotations

import json
from typing import Any, Dict, List

import pytest

pytest.importorskip("torch")

from tests.proc.elastic_jobs import ElasticJob, Worker  # noqa: E402 - after the line above

EVERY, COMMIT = 4, 6
"""Steps from one exchange to the next, and to a commit."""

PROGRAM = """
import json, os, time
import torch
import ringcomm as rc
import ringcomm.torch as hvd

hvd.init()
weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
model = torch.nn.ParameterList([weight])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, joined=0)

@hvd.elastic.run
def train(state):
    while state.joined < 12:
        time.sleep(0.02)
        optimizer.zero_grad()
        target = torch.tensor([1.0, hvd.rank(), state.step], dtype=torch.float64)
        (0.5 * (weight - target).square().sum()).backward()
        optimizer.step()
        state.step += 1
        state.joined += state.step > 12 and hvd.size() == 3
        if state.step == 9 and os.environ.get("VICTIM"):
            print("ends", flush=True)
            os._exit(1)
        if state.step % int(os.environ["COMMIT"]) == 0:
            state.save()
            print("commit", json.dumps([state.step, hvd.size(), weight.tolist()]), flush=True)
            state.commit()

train(state)
"""


def expected(weights: List[float], step: int, size: int) -> List[float]:
    """The mean after :data:`COMMIT` steps of so many ranks from common weights, by one process."""
    ranks = [list(weights) for _ in range(size)]
    for number in range(step - COMMIT, step):
        for rank, own in enumerate(ranks):
            target = (1.0, rank, number)
            own[:] = [value - 0.1 * (value - aim) for value, aim in zip(own, target)]
        if (number - (step - COMMIT)) % EVERY == EVERY - 1 or number == step - 1:
            mean = [sum(items) / size for items in zip(*ranks)]
            ranks = [list(mean) for _ in range(size)]
    return ranks[0]


def commits(worker: Worker) -> List[Any]:
    return [json.loads(line.split(" ", 1)[1]) for line in worker.said("commit")]


@pytest.mark.release
def test_a_member_is_lost_between_exchanges_and_a_newcomer_takes_the_mean() -> None:
    environment = {"COMMIT": str(COMMIT), "RINGCOMM_LOCAL_STEPS": str(EVERY)}
    with ElasticJob("--min-np", "2", "--np", "3", program=PROGRAM, **environment) as job:
        first = job.start(2)
        victim = job.start(1, VICTIM="1")
        job.wait_for(lambda worker, line: worker in first and line.startswith("commit [18, 2"), 2)
        (newcomer,) = job.start(1)
        assert [worker.end() for worker in (*first, newcomer)] == [0, 0, 0], job.output()
        assert victim[0].said("ends"), job.output()
        seen: Dict[int, Any] = {}
        for worker in job.workers:
            for step, size, weights in commits(worker):
                assert seen.setdefault(step, (size, weights)) == (size, weights), job.output()
        sizes = [size for _, (size, _) in sorted(seen.items())]
        assert sizes[:2] == [3, 2] and sizes[-1] == 3, "the ninth step was the victim's last one"
        weights = [0.0] * 3
        for step, (size, found) in sorted(seen.items()):
            assert found == pytest.approx(expected(weights, step, size), abs=1e-12), (step, size)
            weights = found
