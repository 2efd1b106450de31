"""Trains in float64 with a fixed global batch, and prints the loss of every step that was finished.

Variables: DIE ("member:step": where a process kills itself), WAIT_AT (step at which to wait for three ranks).
"""

import os
import signal
import time

import numpy as np

import ringcomm as rc

MEMBER, WAIT_AT = os.environ.get("RINGCOMM_MEMBER", ""), int(os.environ.get("WAIT_AT", "-1"))
EPOCHS, COUNT, GLOBAL_BATCH = 6, 1000, 48
rng = np.random.default_rng(3)
images = rng.normal(size=(COUNT, 20))
labels = np.tanh(images @ rng.normal(size=20)) + 0.1 * rng.normal(size=COUNT)


def loss_and_gradient(weights, mine):
    """The mean over the samples of this rank; zeros where there is none."""
    if not len(mine):
        return np.zeros(1 + len(weights))
    guess = np.tanh(images[mine] @ weights)
    error = guess - labels[mine]
    return np.concatenate(([np.mean(error**2)], images[mine].T @ (error * (1 - guess**2)) / len(mine)))


rc.init()


@rc.elastic.run
def train(state):
    print(f"begins at {state.step} with {rc.size()}", flush=True)
    batches = rc.balanced(COUNT, GLOBAL_BATCH, seed=5)
    while state.step < EPOCHS * len(batches):
        batches.set_step(state.step)
        for mine in batches:
            if os.environ.get("DIE") == f"{MEMBER}:{state.step}":
                os.kill(os.getpid(), signal.SIGKILL)
            while state.step == WAIT_AT and rc.size() < 3:
                time.sleep(0.05)
                state.commit()
            both = rc.allreduce(loss_and_gradient(state.weights, mine), weight=len(mine))
            with state.update():
                state.weights -= 0.3 * both[1:]
                print(f"loss {state.step} {both[0].hex()}", flush=True)


train(rc.elastic.ArrayState(weights=np.zeros(20)))
