"""What every rank checks about gradients that are not there, not always, or not wanted."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any, Callable

import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.errors import NotOfferedError
from tests.adapters.torch.checks_training import OwnWay, loss_of, model_of, sgd
from tests.adapters.torch.harness import same_everywhere
from tests.support.errors import raises


class Partial(nn.Module):
    """A network of which a part is never used, and with a switch that all ranks turn at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(3, 3)
        self.last = nn.Linear(8, 1)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs).tanh()).tanh())


def partial() -> Partial:
    torch.manual_seed(8)
    return Partial()


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def compare(make: Callable[[nn.Module], Any], change: Callable[[Partial, int], None], **options: Any) -> None:
    """Training together gives what one process gets, whatever is changed before each step."""
    model, reference = partial(), partial()
    alone = make(reference)
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)
    for step in range(9):
        change(model, step)
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        change(reference, step)
        alone.zero_grad()
        loss_of(reference, step).backward()
        alone.step()
    for mine, wanted in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(mine, wanted, rtol=0, atol=1e-9), (mine - wanted).abs().max()
        same_everywhere(mine)


def unchanged(model: Partial, step: int) -> None:
    """Only the part that is never used has no gradients."""


def thaw(model: Partial, step: int) -> None:
    """Begin without a part that is trained later on."""
    if step in (0, 4):
        model.first.requires_grad_(step == 4)


def check_what_no_rank_uses_stays_as_it_is() -> None:
    for make in (momentum, adam):
        for options in ({}, {"groups": 2}, {"compression": OwnWay}, {"groups": 99}):
            compare(make, unchanged, **options)


def check_what_was_frozen_at_first_is_reduced_when_it_is_trained() -> None:
    for options in ({}, {"compression": OwnWay}):
        model = partial()
        model.first.requires_grad_(False)
        reference = copy.deepcopy(model)
        alone = momentum(reference)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
        for step in range(9):
            for one in (model, reference):
                thaw(one, step)
            loss_of(model, step, hvd.rank()).backward()
            loss_of(reference, step).backward()
            for one in (optimizer, alone):
                one.step()
                one.zero_grad()
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine, wanted, rtol=0, atol=1e-9)
            same_everywhere(mine)


def check_parameters_that_some_ranks_use() -> None:
    """Ranks may differ in which parameters get gradients; a missing one counts as zeros."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0))
    before = [layer.bias.detach().clone() for layer in layers]
    size = hvd.size()
    for _ in range(2):
        optimizer.zero_grad()
        layers[hvd.rank() % 2](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert layers[2].bias.grad is None
        assert layers[1].bias.grad is not None or size == 1
    for number, shares in enumerate([(size + 1) // 2, size // 2, 0]):
        moved = before[number] - layers[number].bias.detach()
        assert torch.allclose(moved, torch.full((3,), 2.0 * shares / size))
        same_everywhere(layers[number].weight)
    frozen = model_of()
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(False)
    weight = frozen[0].weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(sgd(frozen))
    loss_of(frozen, 0, hvd.rank()).backward()
    optimizer.step()
    assert torch.equal(frozen[0].weight, weight) and frozen[0].weight.grad is None


def check_a_batch_that_is_reduced_and_dropped() -> None:
    """What comes after ``synchronize()`` is reduced by ``step()``, with or without a warning."""
    for of_the_optimizer in (True, False):
        model, reference = model_of(), model_of()
        optimizer, alone = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(reference)
        forget = optimizer.zero_grad if of_the_optimizer else model.zero_grad
        for step in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss_of(model, 100 + step, hvd.rank()).backward()
                optimizer.synchronize()
                forget()
                loss_of(model, step, hvd.rank()).backward()
                optimizer.step()
                forget()
            loss_of(reference, step).backward()
            alone.step()
            alone.zero_grad()
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine, wanted, rtol=0, atol=1e-12)


def check_what_cannot_be_wrapped_or_copied_says_so() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    raises(ValueError, lambda: hvd.DistributedOptimizer(optimizer), "already")
    raises(ValueError, lambda: hvd.DistributedOptimizer(model), "this is a Sequential")
    for copied in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        raises(NotOfferedError, copied, "cannot be copied or pickled")
    fresh = model_of()
    restored = sgd(fresh)
    restored.load_state_dict(optimizer.state_dict())
    assert hvd.DistributedOptimizer(restored).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
