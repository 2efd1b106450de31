"""Elastic training with the calls of Horovod's example for TensorFlow 2, on random data.

    ringrun --horovod -np 2 --min-np 2 --max-np 4 --host-discovery-script … horovod_tensorflow2_elastic.py LOG

The process in the first slot of the host VICTIM dies at batch 20. Rank 0 writes a line for every 10 batches
to LOG. Training ends after such a batch when the file LOG.stop has appeared.
"""

import json
import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

BATCHES, LR, LOG = 100000, 0.01, sys.argv[1]

hvd.init()
tf.keras.utils.set_random_seed(42)

dataset = tf.data.Dataset.from_tensor_slices((tf.random.normal((160, 6)), tf.range(160) % 3))
dataset = dataset.repeat().shuffle(100).batch(8)
model = tf.keras.Sequential([
    tf.keras.layers.Dense(16, activation="relu"),
    tf.keras.layers.Dense(3),
])
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(LR * hvd.size())


@tf.function
def training_step(inputs, labels, allreduce=True):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(inputs, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss_value


# Horovod: initialize model and optimizer state so we can synchronize across workers
for inputs, labels in dataset.take(1):
    training_step(inputs, labels, allreduce=False)


def dies(batch):
    first = os.environ["HOROVOD_LOCAL_RANK"] == "0"
    return batch == 20 and first and os.environ["HOROVOD_HOSTNAME"] == os.environ.get("VICTIM")


@hvd.elastic.run
def train(state):
    start = state.batch
    for index, (inputs, labels) in enumerate(dataset.skip(state.batch).take(BATCHES - start)):
        state.batch = start + index
        if dies(state.batch):
            os._exit(1)
        loss_value = training_step(inputs, labels)
        time.sleep(0.05)
        if state.batch % 10 == 0 and hvd.rank() == 0:
            with open(LOG, "a") as file:
                facts = {"batch": state.batch, "size": hvd.size(), "host": os.environ["HOROVOD_HOSTNAME"]}
                rate = float(tf.keras.backend.get_value(opt.learning_rate))
                file.write(json.dumps({**facts, "loss": float(loss_value), "lr": rate}) + "\n")
        if state.batch % 10 == 0:
            stop = hvd.allreduce(float(Path(LOG + ".stop").exists()), name="stop")
            if float(stop) > 0:
                return
        state.commit()


def on_state_reset():
    opt.learning_rate.assign(LR * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
sums = hvd.allgather(tf.stack([tf.reduce_sum(value) for value in model.variables])[None]).numpy()
assert (sums == sums[0]).all(), "the ranks have different weights"
print("ends with", hvd.size(), "ranks")
