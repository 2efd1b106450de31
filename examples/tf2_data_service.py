"""Teach a small network to read handwritten digits that other processes prepare (TensorFlow's data service).

Two commands, in two terminals and in any order; the second ends the first:

    ringrun -np 2 -m ringcomm.tensorflow.data.compute_worker compute.json             prepare the data
    ringrun -np 2 examples/tf2_data_service.py compute.json                           train

Both take -H for other machines; compute.json must then be in a directory that they share (or be copied). It
contains a key. TensorFlow's data service listens on all addresses without authentication: use it in a
trusted network. With `--dispatcher-side training` for the first command the dispatchers run in the
second; with `--dispatchers 2` every training process has its own. The digits come with scikit-learn.
"""

import argparse
import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringcomm.tensorflow as hvd
from ringcomm.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service


def prepared(dataset, config, args, stack):
    """The dataset, with everything up to here done by the compute job."""
    if config.dispatcher_side == "compute":
        return dataset.send_to_data_service(
            config, hvd.rank(), hvd.size(), reuse_dataset=args.reuse_dataset, round_robin=args.round_robin
        )
    address = stack.enter_context(tf_data_service(config, hvd.rank()))  # lasts as long as training
    in_turn = args.reuse_dataset and args.round_robin
    return dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode="distributed_epoch",
            service=address,
            job_name="job" if args.reuse_dataset else None,
            consumer_index=hvd.rank() if in_turn else None,
            num_consumers=hvd.size() if in_turn else None,
        )
    )


def main():
    parser = argparse.ArgumentParser(description="Train on digits that a compute job prepares.")
    parser.add_argument("configfile", help="what the compute job writes")
    parser.add_argument("--steps", type=int, default=300, help="steps, all processes together [300]")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process [32]")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate for one process [0.001]")
    parser.add_argument(
        "--reuse-dataset", action="store_true", help="the processes share what one dispatcher gives"
    )
    parser.add_argument("--round-robin", action="store_true", help="with --reuse-dataset: in turn")
    args = parser.parse_args()

    hvd.init()
    config = TfDataServiceConfig.read(args.configfile, wait_for_file_creation=True, timeout=120)
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    order = np.random.default_rng(1).permutation(len(images))
    validation, training = order[:360], order[360:]

    with contextlib.ExitStack() as stack:
        dataset = tf.data.Dataset.from_tensor_slices((images[training], labels[training]))
        dataset = dataset.repeat().shuffle(1000).batch(args.batch_size)  # <--- there
        dataset = prepared(dataset, config, args, stack).prefetch(tf.data.AUTOTUNE)  # <--- here

        model = tf.keras.Sequential([
            tf.keras.Input((64,)), tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)
        ])  # fmt: skip
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())
        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

        @tf.function
        def step(batch, truth):
            with tf.GradientTape() as tape:
                loss = loss_of(truth, model(batch, training=True))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        steps = max(1, args.steps // hvd.size())
        for number, batch in enumerate(dataset.take(steps), 1):
            loss = step(*batch)
            if number % 50 == 0 and hvd.rank() == 0:
                print(f"step {number:4d}  loss {float(loss):.4f}", flush=True)

        guesses = np.argmax(model(images[validation]), axis=1)
        accuracy = hvd.allreduce(tf.constant(np.mean(guesses == labels[validation])), name="accuracy")
    if hvd.rank() == 0:
        print(f"final validation accuracy {float(accuracy):.4f}")
        config.compute_client().shutdown()  # training is over: the compute job ends


if __name__ == "__main__":
    main()
