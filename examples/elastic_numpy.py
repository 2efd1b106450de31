# elastic_numpy.py
import numpy as np

import ringcomm as rc

STEPS, GLOBAL_BATCH = 300, 60
rng = np.random.default_rng(0)
images, answers = rng.normal(size=(6000, 20)), np.arange(20.0)
labels = images @ answers

rc.init()  # a process that comes later returns at once, and joins in train()


@rc.elastic.run
def train(state):
    # Called again after every change of the ranks: rc.rank() and rc.size() may differ then.
    print(f"rank {rc.rank()} of {rc.size()} begins at step {state.step}", flush=True)
    while state.step < STEPS:
        # Which samples are in a step depends on its number only, not on the number of ranks.
        batch = np.random.default_rng([1, state.step]).choice(len(images), GLOBAL_BATCH, replace=False)
        mine = batch[rc.rank() :: rc.size()]
        error = images[mine] @ state.weights - labels[mine]
        gradient = rc.allreduce(images[mine].T @ error / GLOBAL_BATCH, op=rc.Sum)
        with state.update():  # the step is finished: a loss cannot undo it
            state.weights -= 0.1 * gradient


state = rc.elastic.ArrayState(weights=np.zeros(20))
train(state)
print(f"rank {rc.rank()}: largest error of a weight {abs(state.weights - answers).max():.1e}")
