"""Teach a small network to read handwritten digits, with a training loop in TensorFlow 2.

    ringrun -np 2 examples/tf2_mnist.py                                   two processes on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/tf2_mnist.py      three machines

What makes the processes one training run are the lines marked with "<---". The digits come with
scikit-learn; nothing is downloaded.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringcomm.tensorflow as hvd


def main():
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with TensorFlow 2 and ringcomm."
    )
    parser.add_argument("--steps", type=int, default=300, help="steps, all processes together [300]")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process [32]")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate for one process [0.001]")
    args = parser.parse_args()

    hvd.init()  # <--- find the other processes
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(images))
    validation, training = order[:360], order[360:]
    mine = training[hvd.rank() :: hvd.size()]  # <--- each takes its share of the images
    batches = iter(
        tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
        .repeat()
        .shuffle(1000, seed=hvd.rank())
        .batch(args.batch_size)
    )

    model = tf.keras.Sequential([
        tf.keras.Input((64,)), tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)
    ])  # fmt: skip
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())  # <--- together they take larger steps
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)  # <--- the same start

    @tf.function
    def step(batch, truth):
        with tf.GradientTape() as tape:
            loss = loss_of(truth, model(batch, training=True))
        tape = hvd.DistributedGradientTape(tape)  # <--- the gradients of all ranks, averaged
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for number in range(1, max(1, args.steps // hvd.size()) + 1):  # <--- so each makes fewer
        loss = step(*next(batches))
        if number % 50 == 0 and hvd.rank() == 0:
            print(f"step {number:4d}  loss {float(loss):.4f}", flush=True)

    guesses = np.argmax(model(images[validation]), axis=1)
    accuracy = hvd.allreduce(tf.constant(np.mean(guesses == labels[validation])), name="accuracy")
    if hvd.rank() == 0:
        print(f"final validation accuracy {float(accuracy):.4f}")


if __name__ == "__main__":
    main()
