"""Teach a convolutional network to read handwritten digits, with Keras, on any number of processes.

    python examples/keras_mnist.py                                          one process
    ringrun -np 2 examples/keras_mnist.py                                   two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/keras_mnist.py      three machines

Runs on whatever Keras runs on: KERAS_BACKEND=tensorflow, torch or jax. What makes the processes one
training run are the lines marked with "<---". The digits are 1797 small ones that come with scikit-learn;
with --mnist DIRECTORY it reads MNIST's own four files there. Every process goes through its share of the
images, or with --whole through all of them, in an order of its own, as Horovod's example does.

Training ends when the validation accuracy reaches --target. With --log FILE.csv rank 0 then collects the
durations of every rank's epochs and writes them to the file.
"""

import argparse
import csv
import gzip
import os
import socket
import struct
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    import keras
    import numpy as np

    import ringcomm.keras as hvd
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {missing.name}"
    ) from None

VALIDATION = 360  # of scikit-learn's digits


def read_idx(directory, name):
    """One of MNIST's files, compressed or not, as an array."""
    for path in (Path(directory) / name, Path(directory) / f"{name}.gz"):
        if path.exists():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            dimensions = data[3]
            shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
            return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    raise SystemExit(f"There is neither {name} nor {name}.gz in {directory}.")


def load(mnist):
    """Images from 0 to 1 with one channel, and labels: for training, then for validation."""
    if mnist:
        sets = [
            (read_idx(mnist, f"{part}-images-idx3-ubyte") / 255, read_idx(mnist, f"{part}-labels-idx1-ubyte"))
            for part in ("train", "t10k")
        ]
    else:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise SystemExit(f"Install scikit-learn: {sys.executable} -m pip install scikit-learn") from None
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8) / 16
        order = np.random.default_rng(1).permutation(len(images))  # the same on every process
        sets = [(images[part], labels[part]) for part in (order[VALIDATION:], order[:VALIDATION])]
    return [(images[..., np.newaxis].astype("float32"), labels.astype("int64")) for images, labels in sets]


def build(shape):
    """A small convolutional network."""
    layers = keras.layers
    return keras.Sequential([
        keras.Input(shape),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Dropout(0.25),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.5),
        layers.Dense(10),
    ])  # fmt: skip


class Record(keras.callbacks.Callback):
    """Notes how long each epoch takes, and ends training when it is good enough."""

    def __init__(self, target):
        super().__init__()
        self.target = target
        self.rows = []
        self.started = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds, accuracy = time.perf_counter() - self.started, logs["val_accuracy"]
        self.rows.append([hvd.rank(), socket.gethostname(), epoch + 1, round(seconds, 3), accuracy])
        print(f"rank {hvd.rank()} on {socket.gethostname()}: epoch {epoch + 1:2d}  {seconds:6.2f} s  "
              f"validation accuracy {accuracy:.4f}", flush=True)  # fmt: skip
        # All have the same average here, so all stop or none.
        self.model.stop_training = accuracy >= self.target


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Keras and ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=30, help="how often to go through the images, at most [30]")
    add("--target", type=float, default=0.99, help="end at this validation accuracy [0.99]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    add("--lr", type=float, default=0.001, help="learning rate for one process [0.001]")
    add("--mnist", metavar="DIRECTORY", help="where MNIST's four files are")
    add("--balanced", action="store_true", help="give slow machines fewer images; --batch-size is for all")
    add("--whole", action="store_true", help="every process goes through all images")
    add("--log", metavar="FILE", help="write times and accuracies of all processes to this CSV file")
    add("--save", metavar="FILE", help="save the trained model (.keras)")
    args = parser.parse_args()

    hvd.init()  # <--- find the other processes
    (images, labels), validation = load(args.mnist)
    balanced, scale = None, hvd.size()
    if args.balanced:
        # <--- each takes as many of each batch as it can compute in time; a step is that of one process
        balanced, scale = hvd.BalancedDataset(images, labels, args.batch_size, multiple_of=4), 1
    elif not args.whole:
        # <--- each takes its share; equally many, or some would wait for others' last batch
        share = len(images) // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        images, labels = images[mine], labels[mine]
    keras.utils.set_random_seed(1 + hvd.rank())

    model = build(images.shape[1:])
    # <--- together the processes take as many times larger steps, so the learning rate is scaled
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * scale), batches=balanced)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    record = Record(args.target)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # <--- all start from the same weights
        hvd.callbacks.MetricAverageCallback(),  # <--- all see the same metrics
        hvd.callbacks.LearningRateWarmupCallback(args.lr * scale, warmup_epochs=2),
        record,
    ]
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es), Keras {keras.__version__} on {keras.backend.backend()}, "
              f"{len(images)} images each", flush=True)  # fmt: skip
    started = time.perf_counter()
    data = {"x": balanced} if balanced else {"x": images, "y": labels, "batch_size": args.batch_size}
    model.fit(**data, epochs=args.epochs, verbose=0, validation_data=validation, callbacks=callbacks)

    all_rows = hvd.allgather_object(record.rows)
    if hvd.rank() == 0:
        reached = record.rows[-1][-1]
        print(f"{len(record.rows)} epochs, {time.perf_counter() - started:.1f} s; "
              f"final validation accuracy {reached:.4f}")  # fmt: skip
        if args.log:
            with open(args.log, "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["rank", "host", "epoch", "seconds", "accuracy"])
                writer.writerows(row for rows in all_rows for row in rows)
        if args.save:
            model.save(args.save)


if __name__ == "__main__":
    main()
