"""Teach a small neural network to read handwritten digits, with PyTorch, on any number of processes.

    python examples/torch_digits.py                                          one process
    ringrun -np 2 examples/torch_digits.py                                   two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/torch_digits.py      three machines

Every process runs this program. The lines marked with "<---" make them one training run.
ringcomm's functions take NumPy arrays; ``tensor.numpy()`` returns one that shares the tensor's memory,
so nothing is copied. The images are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import os
import sys
import time

import numpy as np

import ringcomm as rc

try:
    import torch
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


def gradients_in_one_piece(model):
    """Make all gradients views of one flat tensor, so that one call can add all of them up."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view_as(parameter)  # backward() adds to what is there
        start = stop
    return flat


def accuracy(model, images, labels):
    """The share of images that the network reads correctly."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with PyTorch and ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=15, help="how often to go through all images [15]")
    add("--batch-size", type=int, default=64, help="images per step, all processes together [64]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--seed", type=int, default=1, help="for the initial weights and the shuffling [1]")
    args = parser.parse_args()

    rc.init()  # <--- find the other processes
    if "OMP_NUM_THREADS" not in os.environ:  # ringrun has not shared the cores out
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rc.local_size()))

    # All processes shuffle with the same seed, so they agree on the order without a word.
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((images / 16).astype(np.float32))
    labels = torch.from_numpy(labels.astype(np.int64))
    shuffle = np.random.default_rng(args.seed)
    order = shuffle.permutation(len(images))
    validation, training = order[:VALIDATION], order[VALIDATION:]

    # The initial weights are random, and here they differ on purpose: rank 0's are what counts.
    torch.manual_seed(args.seed + rc.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    for parameter in model.parameters():
        rc.broadcast_(parameter.detach().numpy(), root_rank=0)  # <--- all ranks start from the same weights
    gradients = gradients_in_one_piece(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    add_losses = torch.nn.CrossEntropyLoss(reduction="sum")

    if rc.rank() == 0:
        print(f"{rc.size()} process(es) on {rc.cross_size()} host(s), {len(training)} images, "
              f"{args.batch_size} per step")  # fmt: skip
    for epoch in range(1, args.epochs + 1):
        started, total = time.perf_counter(), 0.0
        order = shuffle.permutation(training)
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            mine = np.array_split(batch, rc.size())[rc.rank()]  # <--- each takes its part of the batch
            gradients.zero_()
            # Parts may be uneven. So: divide by the size of the whole batch, and sum. The result is
            # what a single process would have computed for the whole batch.
            loss = add_losses(model(images[mine]), labels[mine]) / len(batch)
            loss.backward()
            rc.allreduce_(gradients.numpy(), op=rc.Sum)  # <--- sum the gradients of all ranks
            optimizer.step()
            total += loss.item() * len(batch)
        total = float(rc.allreduce(total, op=rc.Sum)) / len(order)  # <--- only to show it
        if rc.rank() == 0:  # all have the same weights, so one can check them for all
            reached = accuracy(model, images[validation], labels[validation])
            print(f"epoch {epoch:2d}  loss {total:.6f}  validation accuracy {reached:.4f}  "
                  f"{time.perf_counter() - started:.2f} s")  # fmt: skip

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rc.rank()}: weights have digest {digest}")
    digests = rc.allgather_object(digest)
    if len(set(digests)) > 1:
        raise SystemExit(f"the weights differ between processes: {digests}")
    if rc.rank() == 0:
        reached = accuracy(model, images[validation], labels[validation])
        print(f"the weights of all {rc.size()} process(es) are bit-identical; final accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
