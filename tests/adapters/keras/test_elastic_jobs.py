"""An elastic job of Keras on TensorFlow: a process is killed in fit(), the others go on in the same one."""

from __future__ import annotations

import pytest

from tests.proc.elastic_jobs import ElasticJob

pytest.importorskip("tensorflow")

PROGRAM = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf
import ringcomm.tensorflow.keras as hvd

hvd.init()
tf.keras.utils.set_random_seed(os.getpid() % 1000)
model = tf.keras.Sequential([
    tf.keras.layers.Input((4,)), tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)
])
model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
x = np.random.RandomState(0).randn(64, 4).astype("float32")

class Report(tf.keras.callbacks.Callback):
    reported = 0
    def on_train_batch_end(self, batch, logs=None):
        if Report.reported != hvd.size():
            Report.reported = hvd.size()
            print(f"step size={hvd.size()} rank={hvd.rank()}", flush=True)

@hvd.elastic.run
def train(state):
    model.fit(x, x.sum(1, keepdims=True), batch_size=4, epochs=6 - state.epoch, verbose=0, callbacks=[
        hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 4), Report(),
    ])

train(hvd.elastic.KerasState(model, batch=0, epoch=0))
print("done", [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables], flush=True)
"""


@pytest.mark.release
@pytest.mark.timeout(900)
def test_fit_goes_on_without_rank_0() -> None:
    options = "--min-np", "2", "--np", "3"
    with ElasticJob(*options, program=PROGRAM, limit_s=600.0, RINGCOMM_START_TIMEOUT="200") as job:
        workers = job.start(3)
        job.wait_for(lambda _, line: line.startswith("step"), 3)
        victim = next(worker for worker in workers if "rank=0" in worker.said("step")[0])
        victim.kill()
        alive = [worker for worker in workers if worker is not victim]
        assert [worker.end() for worker in alive] == [0, 0], job.output()
        assert all("step size=2" in worker.said("step")[-1] for worker in alive), job.output()
        assert len({worker.said("done")[0] for worker in alive}) == 1, job.output()
