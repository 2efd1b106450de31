"""Teach a small neural network to read handwritten digits, with PyTorch Lightning over ringcomm.

    python examples/lightning_ddp.py --processes 2                        Lightning starts them
    torchrun --nproc-per-node 2 examples/lightning_ddp.py --processes 2   torchrun does

Two lines make Lightning use ringcomm's links; they are marked with "<---". The images are part of
scikit-learn; nothing is downloaded.
"""

import argparse
import sys

try:
    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.torch.distributed  # noqa: F401  # <--- makes the backend known

VALIDATION = 360  # images that are kept back, to see what the network makes of ones it never saw


class Digits(lightning.LightningModule):
    """Two layers, and how to train them."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )  # fmt: skip

    def training_step(self, batch, _):
        """The loss of one batch."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, _):
        """How many of one batch are read correctly."""
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Lightning over ringcomm.")
    add = parser.add_argument
    add("--processes", type=int, default=2, help="how many processes on this machine [2]")
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--lr", type=float, default=0.05, help="learning rate [0.05]")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy((images / 16).astype("float32")), torch.from_numpy(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    training = TensorDataset(images[VALIDATION:], labels[VALIDATION:])
    held_back = TensorDataset(images[:VALIDATION], labels[:VALIDATION])

    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="ringcomm"),  # <---
        accelerator="cpu", devices=args.processes, max_epochs=args.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Digits(args.lr),
        DataLoader(training, batch_size=32, shuffle=True),
        DataLoader(held_back, batch_size=90),
    )
    if trainer.is_global_zero:
        backend = torch.distributed.get_backend()
        reached = trainer.callback_metrics["accuracy"].item()
        print(f"{args.processes} process(es) over {backend}; final accuracy {reached:.4f}")
    trainer.strategy.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
