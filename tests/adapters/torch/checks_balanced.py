"""What every rank checks about balanced batches: training equals that of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any, List, Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.balance.division import SampleDivision
from tests.adapters.torch.checks_training import model_of
from tests.adapters.torch.harness import same_everywhere
from tests.support.errors import raises

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


def check_out_of_memory() -> None:
    """The rank contributes nothing in that step, and all ranks go on; its share is bounded afterwards."""
    model, reference = model_of(), model_of()
    batches = hvd.BalancedBatches(4000, 40)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), batches=batches)
    last = hvd.size() - 1
    inputs = torch.ones(4000, 6, dtype=torch.float64)
    before = batches.shares
    for step, indices in enumerate(batches):
        rows = inputs[indices] * (1.0 + hvd.rank())
        optimizer.zero_grad()
        with batches.within_memory():
            if hvd.rank() == last and batches.weight > before[last] - 1:
                raise MemoryError("no room")
            model(rows).sum(0).mul(1.0 / len(rows)).sum().backward()
        if step == 0 and hvd.size() > 1:
            optimizer.synchronize()
            parts = [(share, rank) for rank, share in enumerate(before) if rank != last]
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for share, rank in parts:
                part = model_of()
                part(torch.full((1, 6), 1.0 + rank, dtype=torch.float64)).sum().backward()
                for parameter, own in zip(reference.parameters(), part.parameters()):
                    parameter.grad += own.grad * share / sum(share for share, _ in parts)
            for found, expected in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-13)
            with optimizer.skip_synchronize():
                optimizer.step()
            continue
        if hvd.size() == 1:
            return
        optimizer.step()
        if step == 40:
            break
    assert batches.shares[last] <= 0.9 * before[last], batches.shares
    assert sum(batches.shares) == 40

    def fails() -> None:
        with batches.within_memory():
            raise RuntimeError("another problem")

    raises(RuntimeError, fails, "another")
