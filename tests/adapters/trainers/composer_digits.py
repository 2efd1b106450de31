"""Teach a small neural network to read handwritten digits, with Composer over ringcomm.

It is an ordinary program for Composer; only the line marked with "<---" is about ringcomm. The images are
part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys

try:
    import torch
    import torch.distributed as dist
    from composer import Trainer
    from composer.models import ComposerModel
    from composer.utils import dist as ranks
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn", "composer": "mosaicml"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.torch.distributed

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


class Digits(ComposerModel):
    """Two layers, and their loss."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )  # fmt: skip

    def forward(self, batch):
        """Ten numbers for each image."""
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        """The loss of one batch."""
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    args = parser.parse_args()

    ringcomm.torch.distributed.init()  # <--- joins the other processes
    training, held_back = digits()
    sampler = ranks.get_sampler(training, shuffle=True)
    model = Digits()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(training, batch_size=args.batch_size, sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        max_duration=f"{args.epochs}ep", device="cpu", seed=1, progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    images, labels = held_back.tensors
    with torch.no_grad():
        right = (model.layers(images).argmax(dim=1) == labels).float().mean()
    dist.all_reduce(right, dist.ReduceOp.AVG)
    report(model, dist.get_rank(), dist.get_world_size(), right.item())
    trainer.close()


if __name__ == "__main__":
    main()
