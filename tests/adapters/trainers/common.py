"""What the programs for trainers share: handwritten digits, and a report of the weights of each rank."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

VALIDATION = 357  # images that are kept back


def options(lr):
    """The options of a program."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10, help="how often to go through all images [10]")
    parser.add_argument("--lr", type=float, default=lr, help=f"learning rate [{lr}]")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and process [32]")
    return parser.parse_args()


def digits():
    """The images to learn from, and those that are kept back; the same on all ranks."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy((images / 16).astype("float32")), torch.from_numpy(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    training = TensorDataset(images[VALIDATION:], labels[VALIDATION:])
    return training, TensorDataset(images[:VALIDATION], labels[:VALIDATION])


def network():
    """A small network for the digits."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def accuracy(model, held_back):
    """The share of images that a model reads correctly."""
    images, labels = held_back.tensors
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean()


def report(model, rank, size, reached):
    """Print a digest of this rank's weights, and on rank 0 the accuracy."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print(f"rank {rank}: weights have digest {hashlib.sha256(weights).hexdigest()[:16]}")
    if rank == 0:
        print(f"{size} process(es) over {dist.get_backend()}; final accuracy {reached:.4f}")
