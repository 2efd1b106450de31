"""An elastic job whose processes are killed and replaced again and again: nothing hangs, and nothing grows.

ELASTIC_ROUNDS=20 runs twenty losses and joins; by default there are three.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.proc.elastic_jobs import ElasticJob, fields

ROUNDS = int(os.environ.get("ELASTIC_ROUNDS", "3"))

PROGRAM = """
import gc, os, time
import numpy as np
import ringcomm as rc

def resources():
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return f"fds={descriptors} threads={threads} kib={pages * 4}"

rc.init()

@rc.elastic.run
def train(state):
    rc.check_same({"weights": state.weights})
    first = True
    while rc.broadcast(np.array([os.path.exists(os.environ["GO_ON"])]))[0]:
        time.sleep(0.005)
        total = rc.allreduce(np.full(1000, 1.0, np.float32) * (state.step % 5))
        with state.update():
            state.weights[:1000] += total
        if first:
            print(f"step epoch={rc.epoch()} rank={rc.rank()} size={rc.size()} {resources()}")
            first = False
    rc.check_same({"weights": state.weights})

state = rc.elastic.ArrayState(weights=np.full(1_000_000, np.float32(os.getpid() % 7)))
train(state)
print(f"done {state.step} {state.weights[:2].tolist()} {state.weights[-1]}")
"""


@pytest.mark.release
@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.release
def test_losses_and_joins(tmp_path: Path) -> None:
    dice = random.Random(ROUNDS)
    go_on = tmp_path / "go on"
    go_on.touch()
    with ElasticJob("--min-np", "2", "--np", "4", program=PROGRAM, GO_ON=str(go_on)) as job:
        alive = job.start(4)
        job.wait_for(lambda _, line: line.startswith("step"), 4)
        oldest, *_ = alive
        for number in range(ROUNDS):
            victim = dice.choice(alive[1:])
            alive.remove(victim)
            victim.kill()
            alive += job.start(1)
            newest = alive[-1]
            # The new process may be ready before the next view is published, or only for the one after it.
            job.wait_for(lambda worker, line: worker is newest and line.startswith("step"))  # noqa: B023
            job.wait_for_steps(alive, lambda worker: "size=4" in worker.said("step")[-1])
            assert len(job.notices("lost")) == number + 1, job.output()
        go_on.unlink()
        assert [worker.end() for worker in alive] == [0] * 4, job.output()
        assert len({worker.said("done")[0] for worker in alive}) == 1, job.output()
        assert job.rendezvous.wait(20) == 0
        steps = [fields(line) for line in oldest.said("step") if "size=4" in line]
        half = steps[len(steps) // 2]
        assert int(steps[-1]["fds"]) <= int(half["fds"]) + 3, job.output()
        assert int(steps[-1]["threads"]) <= int(half["threads"]) + 1, job.output()
        assert int(steps[-1]["kib"]) <= 1.15 * int(half["kib"]), job.output()
