"""Handwritten digits with Lightning Fabric over ringcomm."""

import torch
from common import accuracy, digits, network, options, report
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import ringcomm.lightning  # noqa: F401 - makes the strategies known


def main():
    args = options(lr=0.05)
    fabric = Fabric(strategy="ddp_ringcomm", accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(1)
    training, held_back = digits()
    layers = network()
    model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=args.lr, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(training, batch_size=args.batch_size, shuffle=True))
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    reached = fabric.all_reduce(accuracy(layers, held_back)).item()
    report(layers, fabric.global_rank, fabric.world_size, reached)


if __name__ == "__main__":
    main()
