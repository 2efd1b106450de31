"""Horovod's elastic interface for PyTorch, and torch.distributed: a process is killed, the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.elastic_jobs import ElasticJob, fields

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)

HOROVOD = """
import os
import torch
import ringcomm.torch as hvd

hvd.init()
torch.manual_seed(os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    print(f"epoch rank={hvd.rank()} size={hvd.size()}")
    first = True
    while hvd.broadcast_object(state.batch < 20 or os.path.exists(os.environ["GO_ON"])):
        torch.manual_seed(100 * state.batch + hvd.rank())
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        hvd.allreduce(loss.detach(), name="loss")
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
        if first:
            print(f"step size={hvd.size()} batch={state.batch}")
            first = False

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
train(state)
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
moments = sum(float(s["exp_avg"].double().abs().sum()) for s in optimizer.state.values())
print(f"done batch={state.batch} total={total!r} moments={moments!r}")
"""


@pytest.mark.release
@pytest.mark.full
def test_horovods_interface(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    go_on.touch()
    with ElasticJob("--min-np", "2", "--np", "3", program=HOROVOD, limit_s=400.0, GO_ON=str(go_on)) as job:
        alive = job.start(3)
        job.wait_for(lambda _, line: line.startswith("step size=3"), 3)
        (victim,) = [item for item in alive if fields(item.said("epoch")[-1])["rank"] == "0"]
        victim.kill()
        alive.remove(victim)
        job.wait_for(lambda _, line: line.startswith("step size=2"), 2)
        alive += job.start(1)
        job.wait_for(lambda _, line: line.startswith("step size=3"), 3)
        go_on.unlink()
        assert [item.end() for item in alive] == [0, 0, 0], job.output()
        done = {item.said("done")[0] for item in alive}
        assert len(done) == 1, job.output()


GROUPS = """
import os, time
import torch
import torch.distributed as dist
import ringcomm as rc
import ringcomm.torch.distributed

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0

def connect():
    dist.init_process_group("ringcomm", init_method="ringcomm://")
    print(f"group rank={dist.get_rank()} size={dist.get_world_size()}")
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    state = [step, model.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    model.load_state_dict(state[1])
    optimizer.load_state_dict(state[2])
    return state[0], torch.nn.parallel.DistributedDataParallel(model)

def goes_on():
    more = torch.tensor([os.path.exists(os.environ["GO_ON"])])
    dist.broadcast(more, 0)
    return bool(more)

step, ddp = connect()
first = True
while True:
    try:
        if not goes_on():
            break
        time.sleep(0.02)
        optimizer.zero_grad()
        ddp(torch.randn(8, 4) + dist.get_rank()).square().mean().backward()
        optimizer.step()
        step += 1
        if first:
            print(f"step size={dist.get_world_size()}")
            first = False
    except Exception as error:
        print(f"lost {type(error).__name__}")
        if not isinstance(dist.group.WORLD.failure, rc.Recoverable):
            raise
        dist.destroy_process_group()
        step, ddp = connect()
        first = True
dist.barrier()
print(f"done size={dist.get_world_size()} {[p.tolist() for p in model.parameters()]}")
dist.destroy_process_group()
"""


@pytest.mark.release
def test_a_process_group_of_the_processes_that_are_alive(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    go_on.touch()
    with ElasticJob("--min-np", "2", "--np", "4", program=GROUPS, limit_s=400.0, GO_ON=str(go_on)) as job:
        alive = job.start(4)
        for victim_rank, size in (("1", 4), ("0", 3)):
            job.wait_for(lambda _, line: line.startswith(f"step size={size}"), size)  # noqa: B023
            (victim,) = [item for item in alive if fields(item.said("group")[-1])["rank"] == victim_rank]
            victim.kill()
            alive.remove(victim)
        job.wait_for(lambda _, line: line.startswith("step size=2"), 2)
        go_on.unlink()
        assert [item.end() for item in alive] == [0, 0], job.output()
        (done,) = {item.said("done")[0] for item in alive}
        assert done.startswith("done size=2"), job.output()
