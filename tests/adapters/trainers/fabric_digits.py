"""Teach a small neural network to read handwritten digits, with Lightning Fabric over ringcomm.

It is an ordinary program for Fabric; only the lines marked with "<---" are about ringcomm. The images are
part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys

try:
    import torch
    import torch.distributed as dist
    from lightning.fabric import Fabric
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.lightning  # noqa: F401  # <--- makes the strategies known

VALIDATION = 357  # images that are kept back, to see what the network makes of ones it never saw


def digits():
    """The images to learn from, and those that are kept back; the same on all ranks."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy((images / 16).astype("float32")), torch.from_numpy(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    training = TensorDataset(images[VALIDATION:], labels[VALIDATION:])
    return training, TensorDataset(images[:VALIDATION], labels[:VALIDATION])


def report(model, rank, size, reached):
    """Print a digest of this rank's weights, and on rank 0 the accuracy."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print(f"rank {rank}: weights have digest {hashlib.sha256(weights).hexdigest()[:16]}")
    if rank == 0:
        print(f"{size} process(es) over {dist.get_backend()}; final accuracy {reached:.4f}")


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    args = parser.parse_args()

    fabric = Fabric(strategy="ddp_ringcomm", accelerator="cpu")  # <---
    fabric.launch()
    fabric.seed_everything(1)
    training, held_back = digits()
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(training, batch_size=args.batch_size, shuffle=True))
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    images, labels = held_back.tensors
    with torch.no_grad():
        right = (network(images).argmax(dim=1) == labels).float().mean()
    report(network, fabric.global_rank, fabric.world_size, fabric.all_reduce(right).item())


if __name__ == "__main__":
    main()
