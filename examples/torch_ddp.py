"""Teach a small neural network to read handwritten digits, with PyTorch's DistributedDataParallel.

    python examples/torch_ddp.py                                                    one process
    ringrun -np 2 examples/torch_ddp.py                                             two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/torch_ddp.py                three machines
    torchrun --nproc-per-node 2 examples/torch_ddp.py                               two, PyTorch's launcher

It is an ordinary program for torch.distributed; only the two lines marked with "<---" are about ringcomm.
The images are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import os
import sys
import time

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.torch.distributed  # noqa: F401  # <--- makes the backend known

VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


def digits(seed):
    """The images, shuffled alike on all ranks: those to learn from, and those that are kept back."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((images / 16).astype("float32")).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], torch.from_numpy(labels)[order]
    return TensorDataset(images[VALIDATION:], labels[VALIDATION:]), (images[:VALIDATION], labels[:VALIDATION])


def accuracy(model, images, labels):
    """The share of images that the network reads correctly."""
    model.eval()
    with torch.no_grad():
        share = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return share


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DDP over ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--batch-size", type=int, default=64, help="images per step, all processes together [64]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--seed", type=int, default=1, help="for the initial weights and the shuffling [1]")
    args = parser.parse_args()

    # torchrun sets RANK and related variables; ringcomm:// is for ringrun, and for one process alone.
    dist.init_process_group("ringcomm", init_method=None if "RANK" in os.environ else "ringcomm://")  # <---
    rank, size = dist.get_rank(), dist.get_world_size()
    if "OMP_NUM_THREADS" not in os.environ:  # ringrun has not shared the cores out
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))

    training, held_back = digits(args.seed)
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, batch_size=max(1, args.batch_size // size), sampler=sampler)

    # The initial weights are random, and here they differ on purpose: DDP hands out rank 0's.
    torch.manual_seed(args.seed + rank)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 16, 10),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    if rank == 0:
        print(f"{size} process(es), {len(training)} images, {args.batch_size} per step")
    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()  # DDP averages the gradients meanwhile
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:  # all have the same weights, so one can check them for all
            reached = accuracy(model.module, *held_back)
            print(f"epoch {epoch:2d}  loss {total.item():.6f}  validation accuracy {reached:.4f}  "
                  f"{time.perf_counter() - started:.2f} s")  # fmt: skip

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rank}: weights have digest {digest}")
    digests = [None] * size
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        raise SystemExit(f"the weights differ between processes: {digests}")
    if rank == 0:
        reached = accuracy(model.module, *held_back)
        print(f"the weights of all {size} process(es) are bit-identical; final accuracy {reached:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
