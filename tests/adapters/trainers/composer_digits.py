"""Handwritten digits with Composer over ringcomm."""

import torch
import torch.distributed as dist
from common import accuracy, digits, network, options, report
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist as ranks
from torch.utils.data import DataLoader

import ringcomm.torch.distributed


class Digits(ComposerModel):
    """Two layers, and their loss."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, batch):
        """Ten numbers for each image."""
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        """The loss of one batch."""
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def main():
    args = options(lr=0.05)
    ringcomm.torch.distributed.init()  # joins the other processes
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
    right = accuracy(model.layers, held_back)
    dist.all_reduce(right, dist.ReduceOp.AVG)
    report(model, dist.get_rank(), dist.get_world_size(), right.item())
    trainer.close()


if __name__ == "__main__":
    main()
