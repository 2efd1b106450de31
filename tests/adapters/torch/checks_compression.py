"""What every rank checks about compressed gradients: same bits, error feedback, what is compressed."""

from __future__ import annotations

import copy
from typing import Any, List

import numpy as np
import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.torch.reducer import FlatBucket
from tests.adapters.torch.harness import same_everywhere

WIDTH = 96


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3),
    )  # fmt: skip


def data(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 1, 8, 8, generator=generator)
    return inputs, inputs.mean((1, 2, 3)).mul(8).round().clamp(-1, 1).long() + 1


def train(compression: Any, steps: int = 6, clip: float = 0.0, **options: Any) -> Any:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )
    losses: List[float] = []
    for step in range(steps):
        inputs, targets = data(step, hvd.rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    return losses, model, optimizer


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([item.detach().reshape(-1) for item in model.parameters()])


COMPRESSIONS = [hvd.Compression.int8, hvd.Compression.int4, "int8", "bf16"]


def check_training_goes_on_with_the_same_bits_everywhere() -> None:
    plain, reference, _ = train(hvd.Compression.none)
    for compression in COMPRESSIONS:
        losses, model, _ = train(compression)
        same_everywhere(parameters_of(model))
        assert abs(losses[-1] - plain[-1]) < 0.12, (compression, losses, plain)
        if hvd.size() > 1:
            assert not torch.equal(parameters_of(model), parameters_of(reference)), compression


def _linear(compression: Any, steps: int, op: Any) -> Any:
    """A model whose gradient on each rank is given: delivered gradients, true ones, residuals."""
    weight = nn.Parameter(torch.zeros(80, 70))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), [("w", weight)], compression=compression, op=op
    )
    delivered, true = torch.zeros(80, 70).double(), torch.zeros(80, 70).double()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(80, 70, generator=generator) for _ in range(hvd.size())]
        optimizer.zero_grad()
        (weight * gradients[hvd.rank()]).sum().backward()
        optimizer.step()
        scale = hvd.size() if op == hvd.Average else 1
        delivered += weight.grad.double() * scale
        true += torch.stack(gradients).double().sum(0)
    own = torch.from_numpy(optimizer.residual_state_dict()["w"]).reshape(80, 70)
    return delivered, true, hvd.allreduce(own.double(), op=hvd.Sum), optimizer


def check_what_was_delivered_and_the_residuals_are_all_gradients() -> None:
    if hvd.size() == 1:
        return
    for compression in (hvd.Compression.int8, hvd.Compression.int4):
        for op in (hvd.Average, hvd.Sum):
            delivered, true, left, _ = _linear(compression, 10, op)
            assert left.abs().max() > 1e-3
            assert (delivered + left - true).abs().max() < 2e-3, compression


def check_residuals_are_saved_loaded_and_dropped() -> None:
    if hvd.size() == 1:
        return
    *_, optimizer = _linear(hvd.Compression.int8, 3, hvd.Average)
    saved = optimizer.residual_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    assert np.abs(saved["w"]).max() > 0
    optimizer.load_state_dict(state)
    assert not optimizer.residual_state_dict()["w"].any()
    optimizer.load_residual_state_dict(saved)
    assert optimizer.residual_state_dict()["w"].tobytes() == saved["w"].tobytes()
    optimizer.scale_residuals(2.0)
    assert np.array_equal(optimizer.residual_state_dict()["w"], 2 * saved["w"])


def check_ranks_choose_after_uneven_steps() -> None:
    """Each epoch ends with join(), before which ranks make different numbers of steps."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression="auto")
    for _ in range(3):
        for step in range(4 + hvd.rank()):
            inputs, targets = data(step, hvd.rank())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), hvd.join())
    same_everywhere(parameters_of(model))


def check_the_choice_is_made_for_all_ranks() -> None:
    """On fast links nothing is gained; where sending takes long, all ranks change over in the same step."""
    from unittest import mock

    from ringcomm._adapter import compression as choice

    if hvd.size() == 1:
        return
    slow = choice.Links(hvd.size(), 1, 1e-4, 1e-3)
    for links, expected in ((slow, "int8"), (choice.Links(hvd.size(), 1, 1e-13, 0.0), "none")):
        with mock.patch.object(choice, "links_of", lambda *ignored, links=links: links):
            losses, model, optimizer = train("auto", steps=choice.STEPS + 4)
        same_everywhere(parameters_of(model))
        buckets = [item for item in optimizer._reducer.buckets if isinstance(item, FlatBucket)]
        assert ("int8" in {bucket._codec for bucket in buckets}) == (expected == "int8")
        assert np.isfinite(losses).all()
