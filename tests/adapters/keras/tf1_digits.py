"""Teach a small network to read handwritten digits, in the manner of TensorFlow 1: a graph and a session.

What makes the processes one training run are the lines marked with "<---". The digits come with
scikit-learn; nothing is downloaded.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import ringcomm.tensorflow as hvd


def dense(inputs, units, name):
    """A layer."""
    with tf.variable_scope(name):
        weights = tf.get_variable("weights", [int(inputs.shape[1]), units])
        biases = tf.get_variable("biases", [units], initializer=tf.zeros_initializer())
    return tf.matmul(inputs, weights) + biases


def main():
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with TensorFlow 1 and ringcomm."
    )
    parser.add_argument("--steps", type=int, default=600, help="steps, all processes together [600]")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process [32]")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one process [0.05]")
    parser.add_argument("--checkpoints", metavar="DIRECTORY", help="rank 0 writes checkpoints here")
    args = parser.parse_args()

    tf.disable_eager_execution()
    hvd.init()  # <--- find the other processes
    data, labels = load_digits(return_X_y=True)
    data, labels = (data / 16).astype(np.float32), labels.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(data))
    validation, training = order[:360], order[360:]
    mine = training[hvd.rank() :: hvd.size()]  # <--- each takes its share of the images
    draw = np.random.default_rng(hvd.rank())

    images = tf.placeholder(tf.float32, [None, 64])
    truth = tf.placeholder(tf.int64, [None])
    logits = dense(tf.nn.relu(dense(images, 64, "hidden")), 10, "output")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=truth, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), truth), tf.float32))

    optimizer = tf.train.AdagradOptimizer(args.lr * hvd.size())  # <--- together they take larger steps
    optimizer = hvd.DistributedOptimizer(optimizer)  # <--- the gradients of all ranks, averaged
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)

    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),  # <--- all start from the same weights
        tf.train.StopAtStepHook(last_step=max(1, args.steps // hvd.size())),  # <--- so each makes fewer
    ]
    checkpoints = args.checkpoints if hvd.rank() == 0 else None  # <--- one writes for all
    reached = 0.0
    with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, hooks=hooks) as session:
        while not session.should_stop():
            batch = draw.choice(mine, args.batch_size)
            _, number = session.run([train, step], {images: data[batch], truth: labels[batch]})
            if not session.should_stop() and number % 50 == 0:
                reached = session.run(accuracy, {images: data[validation], truth: labels[validation]})
                if hvd.rank() == 0:
                    print(f"step {number:4d}  validation accuracy {reached:.4f}", flush=True)
    if hvd.rank() == 0:
        print(f"final validation accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
