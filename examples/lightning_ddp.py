"""Teach a small neural network to read handwritten digits, with PyTorch Lightning over ringcomm.

    python examples/lightning_ddp.py                                 one process
    ringrun -np 2 examples/lightning_ddp.py                          two on this machine
    ringrun -np 3 -H localhost:2,jetson1 examples/lightning_ddp.py   two machines, with 2 and 1

It is an ordinary program for Lightning; only the lines marked with "<---" are about ringcomm. The images are
part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys

try:
    import lightning
    import torch
    import torch.distributed as dist
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


def whole(weight):
    """A weight's values, gathered from all ranks if they are sharded."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def report(model, rank, size, reached):
    """Print a digest of this rank's weights, and on rank 0 the accuracy."""
    weights = b"".join(whole(weight).detach().numpy().tobytes() for weight in model.parameters())
    print(f"rank {rank}: weights have digest {hashlib.sha256(weights).hexdigest()[:16]}")
    if rank == 0:
        print(f"{size} process(es) over {dist.get_backend()}; final accuracy {reached:.4f}")


class Digits(lightning.LightningModule):
    """Two layers, and how to train them."""

    def __init__(self, lr, sharded):
        super().__init__()
        self.lr, self.sharded = lr, sharded
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )  # fmt: skip

    def configure_model(self):
        """With FSDP2, every rank keeps a part of each layer."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (self.layers[0], self.layers[2], self.layers):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        """The loss of one batch."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, _):
        """Return how many of one batch are read correctly."""
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        """Gradient descent with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    add("--fsdp2", action="store_true", help="shard the model with FSDP2 instead of DistributedDataParallel")
    args = parser.parse_args()

    trainer = lightning.Trainer(
        strategy="fsdp2_ringcomm" if args.fsdp2 else "ddp_ringcomm",  # <---
        accelerator="cpu", max_epochs=args.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    lightning.seed_everything(1)
    training, held_back = digits()
    model = Digits(args.lr, args.fsdp2)
    trainer.fit(
        model,
        DataLoader(training, batch_size=args.batch_size, shuffle=True),
        DataLoader(held_back, batch_size=args.batch_size),
    )
    reached = trainer.callback_metrics["accuracy"].item()
    report(model, trainer.global_rank, trainer.world_size, reached)


if __name__ == "__main__":
    main()
