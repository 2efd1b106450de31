"""Teach a small neural network to read handwritten digits, with JAX and optax, on any number of processes.

    python examples/jax_digits.py                                          one process
    ringrun -np 2 examples/jax_digits.py                                   two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/jax_digits.py      three machines

Every process runs this program. The lines marked with "<---" make them one training run.
The images are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys
import time

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.jax as hvd

VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


def initial_parameters(seed):
    """Random weights of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": (jax.random.normal(first, (64, 64)) / 8, jnp.zeros(64)),
        "output": (jax.random.normal(second, (64, 10)) / 8, jnp.zeros(10)),
    }


def network(params, images):
    """The network's scores of the ten digits for each image."""
    (weights, bias), (last_weights, last_bias) = params["hidden"], params["output"]
    return jax.nn.relu(images @ weights + bias) @ last_weights + last_bias


def accuracy(params, images, labels):
    """The share of images that the network reads correctly."""
    return float((network(params, images).argmax(1) == labels).mean())


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with JAX and ringcomm.")
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

    # The initial weights are random, and here they differ on purpose: rank 0's are what counts.
    params = hvd.broadcast_parameters(initial_parameters(args.seed + hvd.rank()))  # <--- all start alike
    # Parts of a batch may be uneven. So each process divides its loss by the size of the whole batch, and
    # gradients are summed. The result is what a single process would have computed for the whole batch.
    optimizer = hvd.DistributedOptimizer(optax.sgd(args.lr, momentum=0.9), op=hvd.Sum)  # <---
    state = optimizer.init(params)

    def loss_of(params, images, labels, count):
        losses = optax.softmax_cross_entropy_with_integer_labels(network(params, images), labels)
        return losses.sum() / count

    @hvd.jit
    def step(params, state, images, labels, count):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels, count)
        updates, state = optimizer.update(gradients, state, params)  # sums the gradients of all ranks
        return optax.apply_updates(params, updates), state, hvd.psum(loss)  # <--- psum: only to show it

    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es) on {hvd.cross_size()} host(s), {len(training)} images, "
              f"{args.batch_size} per step")  # fmt: skip
    for epoch in range(1, args.epochs + 1):
        started, total = time.perf_counter(), 0.0
        order = shuffle.permutation(training)
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            mine = np.array_split(batch, hvd.size())[hvd.rank()]  # <--- each takes its part of the batch
            params, state, loss = step(params, state, images[mine], labels[mine], np.float32(len(batch)))
            total += float(loss) * len(batch)
        if hvd.rank() == 0:  # all have the same weights, so one can check them for all
            reached = accuracy(params, images[validation], labels[validation])
            print(f"epoch {epoch:2d}  loss {total / len(order):.6f}  validation accuracy {reached:.4f}  "
                  f"{time.perf_counter() - started:.2f} s")  # fmt: skip

    weights = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(params))
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {hvd.rank()}: weights have digest {digest}")
    digests = hvd.allgather_object(digest)
    if len(set(digests)) > 1:
        raise SystemExit(f"the weights differ between processes: {digests}")
    if hvd.rank() == 0:
        reached = accuracy(params, images[validation], labels[validation])
        print(f"the weights of all {hvd.size()} process(es) are bit-identical; final accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
