"""Handwritten digits with Hugging Face Accelerate over ringcomm."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import accuracy, digits, network, options, report
from torch.utils.data import DataLoader

import ringcomm.torch.distributed


def main():
    args = options(lr=0.05)
    ringcomm.torch.distributed.init()  # joins the other processes
    accelerator = Accelerator(cpu=True)  # without cpu=True, every process would train alone
    set_seed(1)
    training, held_back = digits()
    layers = network()
    model, optimizer, loader = accelerator.prepare(
        layers,
        torch.optim.SGD(layers.parameters(), lr=args.lr, momentum=0.9),
        DataLoader(training, batch_size=args.batch_size, shuffle=True),
    )
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    reached = accelerator.reduce(accuracy(layers, held_back), reduction="mean").item()
    report(layers, accelerator.process_index, accelerator.num_processes, reached)
    accelerator.end_training()


if __name__ == "__main__":
    main()
