"""Teach a small neural network to read handwritten digits, with NumPy, on any number of processes.

    python examples/numpy_digits.py                                          one process
    ringrun -np 2 examples/numpy_digits.py                                   two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/numpy_digits.py      three machines

Every process runs this same program. What makes them one training run are the five lines marked
with "<---". The images are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys
import time

import numpy as np

import ringcomm as rc

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit(
        "This example's images come with scikit-learn, which is missing here. "
        f"Install it: {sys.executable} -m pip install scikit-learn"
    ) from None

HIDDEN = 64
SHAPES = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]  # two layers: weights and biases of each
VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


def split(flat):
    """The layers' weights and biases as views of one flat array: changing one changes the other."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES)]


def forward(weights, images):
    """The activations of the hidden layer, and the probability of each digit."""
    w1, b1, w2, b2 = split(weights)
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def add_gradient(weights, gradient, images, labels):
    """Add these images' gradient to ``gradient``; return the sum of their losses."""
    hidden, probability = forward(weights, images)
    loss = -np.log(probability[np.arange(len(labels)), labels]).sum()
    probability[np.arange(len(labels)), labels] -= 1  # now the derivative with respect to the scores
    back = (probability @ split(weights)[2].T) * (hidden > 0)
    parts = images.T @ back, back.sum(0), hidden.T @ probability, probability.sum(0)
    for total, part in zip(split(gradient), parts):
        total += part
    return loss


def accuracy(weights, images, labels):
    """The share of images that the network reads correctly."""
    return np.mean(forward(weights, images)[1].argmax(axis=1) == labels)


def equal_parts(count, batch_size):
    """This process's part of each batch: positions, as equally many for each process as possible."""
    for start in range(0, count, batch_size):
        yield np.array_split(np.arange(start, min(count, start + batch_size)), rc.size())[rc.rank()]


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with NumPy and ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=15, help="how often to go through all images [15]")
    add("--batch-size", type=int, default=64, help="images per step, all processes together [64]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--seed", type=int, default=1, help="for the initial weights and the shuffling [1]")
    add("--balanced", action="store_true", help="give slow machines fewer images")
    args = parser.parse_args()

    rc.init()  # <--- find the other processes

    # All processes shuffle with the same seed, so they agree on the order without a word.
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    shuffle = np.random.default_rng(args.seed)
    order = shuffle.permutation(len(images))
    validation, training = order[:VALIDATION], order[VALIDATION:]

    # The initial weights are random, and here they differ on purpose: rank 0's are what counts.
    random = np.random.default_rng([args.seed, rc.rank()])
    weights = np.zeros(sum(int(np.prod(shape)) for shape in SHAPES))
    for part in split(weights)[::2]:
        part[...] = random.normal(0, np.sqrt(2 / len(part)), part.shape)
    rc.broadcast_(weights, root_rank=0)  # <--- all ranks start from the same weights

    if rc.rank() == 0:
        print(f"{rc.size()} process(es) on {rc.cross_size()} host(s), {len(training)} images, "
              f"{args.batch_size} per step")  # fmt: skip
    gradient, momentum = np.empty_like(weights), np.zeros_like(weights)
    balanced = rc.balanced(len(training), args.batch_size, args.seed) if args.balanced else None
    for epoch in range(1, args.epochs + 1):
        started, loss = time.perf_counter(), 0.0
        order = training if args.balanced else shuffle.permutation(training)
        for mine in balanced or equal_parts(len(order), args.batch_size):  # <--- each takes its part
            mine = order[mine]
            gradient.fill(0)
            loss += add_gradient(weights, gradient, images[mine], labels[mine])
            gradient /= max(1, len(mine))
            # Parts may be uneven. Weighted by their sizes, the average is what a single process would have
            # computed for the whole batch.
            rc.allreduce_(gradient, weight=len(mine))  # <--- average the gradients of all ranks
            momentum *= 0.9
            momentum += gradient
            weights -= args.lr * momentum
        trained = time.perf_counter() - started
        loss = float(rc.allreduce(loss, op=rc.Sum)) / len(order)  # <--- only to show it
        if args.balanced:
            reached = accuracy(weights, images[validation], labels[validation])
            print(f"rank {rc.rank()}: epoch {epoch:2d}  {trained:.2f} s  validation accuracy {reached:.4f}  "
                  f"batches of {balanced.shares[rc.rank()]}", flush=True)  # fmt: skip
        if rc.rank() == 0:  # all have the same weights, so one can check them for all
            reached = accuracy(weights, images[validation], labels[validation])
            print(f"epoch {epoch:2d}  loss {loss:.6f}  validation accuracy {reached:.4f}  "
                  f"{time.perf_counter() - started:.2f} s")  # fmt: skip

    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
    print(f"rank {rc.rank()}: weights have digest {digest}")
    digests = rc.allgather_object(digest)
    if len(set(digests)) > 1:
        raise SystemExit(f"the weights differ between processes: {digests}")
    if rc.rank() == 0:
        reached = accuracy(weights, images[validation], labels[validation])
        print(f"the weights of all {rc.size()} process(es) are bit-identical; final accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
