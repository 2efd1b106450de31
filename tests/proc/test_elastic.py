"""Elastic jobs: a process is lost or joins, and the others go on in the same processes."""

from __future__ import annotations

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
    while state.step < STEPS or os.path.exists(os.environ.get("GO_ON", "")):
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
