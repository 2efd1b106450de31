"""Elastic jobs: a process is lost or joins, and the others go on in the same processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.proc.elastic_jobs import ElasticJob, fields

PROGRAM = """
import os, time
import numpy as np
import ringcomm as rc

STEPS, COUNT = int(os.environ["STEPS"]), int(os.environ["COUNT"])
time.sleep(float(os.environ.get("IMPORTS_S", "0")))
rc.init()

@rc.elastic.run
def train(state):
    print(f"epoch number={rc.epoch()} rank={rc.rank()} size={rc.size()} step={state.step}")
    first = True
    def goes_on():
        return state.step < STEPS or os.path.exists(os.environ.get("GO_ON", ""))
    while rc.broadcast(np.array([goes_on()]))[0]:
        time.sleep(0.01)
        gradient = rc.allreduce(np.full(COUNT, 1.0, np.float32) * (state.step % 7))
        with state.update():
            state.weights += gradient
        if first:
            print(f"step number={state.step} epoch={rc.epoch()} pid={os.getpid()}")
            first = False

state = rc.elastic.ArrayState(weights=np.full(COUNT, np.float32(os.getpid() % 5)))
train(state)
same = rc.check_same({"weights": state.weights})
print(f"done step={state.step} start={float(state.weights[0]) - sum(i % 7 for i in range(state.step))}")
"""
STEPS = "150"


def test_a_killed_process_is_lost_and_the_others_go_on() -> None:
    with ElasticJob("--min-np", "2", "--np", "4", program=PROGRAM, STEPS=STEPS, COUNT="1000") as job:
        workers = job.start(4)
        started = job.wait_for(lambda _, line: line.startswith("step"), 4)
        victim = next(worker for worker in workers if fields(worker.said("epoch")[0])["rank"] == "0")
        assert len(started) == 4
        victim.kill()
        job.wait_for(lambda _, line: line.startswith("step") and "epoch=1" in line, 3)
        assert [worker.end() for worker in workers if worker is not victim] == [0, 0, 0], job.output()
        done = {worker.said("done")[0] for worker in workers if worker is not victim}
        assert len(done) == 1 and f"step={STEPS}" in done.pop(), job.output()
        assert job.rendezvous.wait(10) == 0
        (lost,) = job.notices("lost")
        assert "rank 0" in lost


def test_a_new_process_joins_without_delay_by_its_imports(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    go_on.touch()
    with ElasticJob("--min-np", "2", program=PROGRAM, STEPS="1", COUNT="1000", GO_ON=str(go_on)) as job:
        job.start(2)
        job.wait_for(lambda _, line: line.startswith("step"), 2)
        (new,) = job.start(1, IMPORTS_S="1")
        job.wait_for(lambda worker, line: worker is new and line.startswith("step number"))
        go_on.unlink()
        assert [worker.end() for worker in job.workers] == [0, 0, 0], job.output()
        done = {worker.said("done")[0] for worker in job.workers}
        assert len(done) == 1, job.output()  # the new process has taken the state of the others
        (joined,) = [line for line in job.notices("view") if "going on with 3 ranks after" in line]
        assert job.rendezvous.wait(10) == 0


@pytest.mark.release
def test_a_stopped_process_is_left_behind_and_refused_when_it_runs_again() -> None:
    with ElasticJob(
        "--min-np", "2", "--np", "3", program=PROGRAM, STEPS="300", COUNT="1000", RINGCOMM_DEAD_AFTER="2"
    ) as job:
        workers = job.start(3)
        job.wait_for(lambda _, line: line.startswith("step"), 3)
        victim = workers[1]
        victim.process.send_signal(signal.SIGSTOP)
        job.wait_for(lambda _, line: line.startswith("step") and "epoch=1" in line, 2)
        victim.process.send_signal(signal.SIGCONT)
        assert victim.end() == 1, job.output()
        said = "\n".join(victim.lines)
        # By the rendezvous' refusal, or, if a message of its own met the closed connection first, by itself.
        assert "was cut off from its job" in said and "job has gone on without" in said, said
        assert "Traceback" not in said, said
        assert [worker.end() for worker in workers if worker is not victim] == [0, 0], job.output()


@pytest.mark.full
def test_a_wrong_key_disturbs_no_rank() -> None:
    with ElasticJob("--min-np", "2", program=PROGRAM, STEPS=STEPS, COUNT="10") as job:
        workers = job.start(2)
        job.wait_for(lambda _, line: line.startswith("step"), 2)
        (wrong,) = job.start(1, RINGCOMM_KEY="ab" * 32, RINGCOMM_START_TIMEOUT="1")
        assert wrong.end() == 1
        assert [worker.end() for worker in workers] == [0, 0], job.output()
        assert all(len(worker.said("epoch")) == 1 for worker in workers), job.output()


def test_a_defect_of_the_program_ends_the_job() -> None:
    program = PROGRAM.replace("np.full(COUNT, 1.0,", "np.full(COUNT + rc.rank(), 1.0,")
    with ElasticJob("--min-np", "1", "--np", "2", program=program, STEPS="5", COUNT="10") as job:
        workers = job.start(2)
        assert [worker.end() for worker in workers] == [1, 1], job.output()
        assert all("do not make the same call" in "\n".join(item.lines) for item in workers), job.output()
        assert job.rendezvous.wait(10) == 1


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
@pytest.mark.timeout(600)
def test_a_process_group_of_the_processes_that_are_alive(tmp_path: Path) -> None:
    pytest.importorskip("torch")
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
