"""Teach a small neural network to read handwritten digits, with MLX, on any number of processes.

    python examples/mlx_digits.py                                          one process
    ringrun -np 2 examples/mlx_digits.py                                   two on this machine
    ringrun -np 3 -H localhost,mac1,jetson1 examples/mlx_digits.py         three machines

Every process runs this program. The lines marked with "<---" make them one training run.
The images are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys
import time

import numpy as np

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_map
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn", "mlx": "'mlx[cpu]'"}.get(missing.name.split(".")[0], missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.mlx as hvd

VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


def accuracy(model, images, labels):
    """The share of images that the network reads correctly."""
    return (mx.argmax(model(images), axis=1) == labels).mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with MLX and ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=15, help="how often to go through all images [15]")
    add("--batch-size", type=int, default=64, help="images per step, all processes together [64]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--seed", type=int, default=1, help="for the initial weights and the shuffling [1]")
    args = parser.parse_args()

    hvd.init()  # <--- find the other processes

    # All processes shuffle with the same seed, so they agree on the order without a word.
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    shuffle = np.random.default_rng(args.seed)
    order = shuffle.permutation(len(images))
    validation, training = order[:VALIDATION], order[VALIDATION:]
    kept = mx.array(images[validation]), mx.array(labels[validation])

    # The initial weights are random, and here they differ on purpose: rank 0's are what counts.
    mx.random.seed(args.seed + hvd.rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    hvd.broadcast_parameters(model)  # <--- all start alike
    # Parts of a batch may be uneven. So each process divides its loss by the size of the whole batch, and
    # gradients are summed. The result is what a single process would have computed for the whole batch.
    optimizer = hvd.DistributedOptimizer(optim.SGD(args.lr, momentum=0.9), op=hvd.Sum)  # <---

    def loss_of(images, labels, count):
        return nn.losses.cross_entropy(model(images), labels, reduction="sum") / count

    loss_and_gradients = nn.value_and_grad(model, loss_of)

    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es) on {hvd.cross_size()} host(s), {len(training)} images, "
              f"{args.batch_size} per step")  # fmt: skip
    for epoch in range(1, args.epochs + 1):
        started, total = time.perf_counter(), 0.0
        order = shuffle.permutation(training)
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            mine = np.array_split(batch, hvd.size())[hvd.rank()]  # <--- each takes its part of the batch
            if len(mine):
                part = mx.array(images[mine]), mx.array(labels[mine])
                loss, gradients = loss_and_gradients(*part, len(batch))
            else:  # MLX computes no loss of nothing
                loss, gradients = mx.array(0.0), tree_map(mx.zeros_like, model.trainable_parameters())
            optimizer.update(model, gradients)  # sums the gradients of all ranks
            total += hvd.allreduce(loss, op=hvd.Sum).item() * len(batch)  # <--- only to show it
        if hvd.rank() == 0:  # all have the same weights, so one can check them for all
            print(f"epoch {epoch:2d}  loss {total / len(order):.6f}  validation accuracy "
                  f"{accuracy(model, *kept):.4f}  {time.perf_counter() - started:.2f} s")  # fmt: skip

    weights = b"".join(np.asarray(leaf).tobytes() for _, leaf in tree_flatten(model.parameters()))
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {hvd.rank()}: weights have digest {digest}")
    digests = hvd.allgather_object(digest)
    if len(set(digests)) > 1:
        raise SystemExit(f"the weights differ between processes: {digests}")
    if hvd.rank() == 0:
        print(f"the weights of all {hvd.size()} process(es) are bit-identical; "
              f"final accuracy {accuracy(model, *kept):.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
