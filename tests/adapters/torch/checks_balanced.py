"""What every rank checks about balanced batches: training equals that of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any, List, Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.balance.plan import SampleDivision
from tests.adapters.torch.checks_training import model_of
from tests.adapters.torch.harness import same_everywhere

COUNT, GLOBAL_BATCH, EPOCHS = 70, 16, 2
SHARES = {1: [1], 2: [3, 1], 3: [3, 0, 1], 4: [5, 0, 1, 1]}
"""Some ranks have no samples at all."""


class Indexed(TensorDataset):
    """Samples with their indices."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


def dataset() -> Indexed:
    inputs = torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Indexed(inputs, inputs.sin().sum(1, keepdim=True))


def optimizers(model: nn.Module) -> Sequence[Any]:
    return (
        torch.optim.SGD(model.parameters(), lr=0.05),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        torch.optim.Adam(model.parameters(), lr=0.01),
    )


def alone(number: int) -> List[torch.Tensor]:
    """One process that computes the whole global batches."""
    model, data, division = model_of(), dataset(), SampleDivision(COUNT, GLOBAL_BATCH, seed=4)
    optimizer = optimizers(model)[number]
    for epoch in range(EPOCHS):
        for step in range(division.steps):
            rows = torch.from_numpy(division.batch(epoch, step))
            optimizer.zero_grad()
            (model(data.tensors[0][rows]) - data.tensors[1][rows]).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(
    model: nn.Module, optimizer: Any, loader: Any, batches: Any, seen: Counter, steps: int = -1
) -> None:
    for x, y, indices in loader:
        if batches.weight:
            seen.update(indices.tolist())
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        steps -= 1
        if steps == 0:
            return


def total(seen: Counter) -> Counter:
    everything: Counter = Counter()
    for counted in rc.allgather_object(seen):
        everything.update(counted)
    return everything


def check_training_equals_that_of_one_process() -> None:
    for number in range(3):
        for workers in (0, 2 if number == 0 else 0):
            model = model_of()
            batches = hvd.BalancedBatches(dataset(), GLOBAL_BATCH, 4, speeds=SHARES[hvd.size()])
            loader = DataLoader(dataset(), batch_sampler=batches, num_workers=workers)
            assert len(loader) == 5
            optimizer = hvd.DistributedOptimizer(
                optimizers(model)[number], named_parameters=model.named_parameters(), batches=batches
            )
            for epoch in range(EPOCHS):
                batches.set_epoch(epoch)
                seen: Counter = Counter()
                train(model, optimizer, loader, batches, seen)
                assert total(seen) == Counter(range(COUNT))
            for found, expected in zip(model.parameters(), alone(number)):
                torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-13)
                same_everywhere(found.detach())
