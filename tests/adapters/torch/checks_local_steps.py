"""What every rank checks about local steps: beside one process that trains for all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm._adapter.local_sgd import PROBE
from tests.adapters.torch.checks_compression import parameters_of


def _reference_of_local_steps(clips: bool, dtype: Any, frozen: bool) -> Any:
    """One process that trains the models of all ranks, and averages them after every third step."""
    models = [_small_model(frozen) for _ in range(hvd.size())]
    trainings = [_LocalTraining(model, rank, clips, dtype) for rank, model in enumerate(models)]
    for step in range(1, 8):
        for training in trainings:
            training.step()
        if step % 3 == 0 or step == 7:
            with torch.no_grad():
                for items in zip(*(model.state_dict().values() for model in models)):
                    if items[0].is_floating_point():
                        mean = torch.stack(items).mean(0)
                        for item in items:
                            item.copy_(mean)
    return models[0]


def _small_model(frozen: bool) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(not frozen)
    return model


class _LocalTraining:
    """The local steps of a rank: gradient clipping, a schedule of the learning rate, mixed precision."""

    def __init__(self, model: Any, rank: int, clips: bool, dtype: Any) -> None:
        self.model, self._clips, self._dtype = model, clips, dtype
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self._generator = torch.Generator().manual_seed(rank)

    def step(self) -> None:
        inputs = torch.randn(5, 6, generator=self._generator)
        targets = torch.randint(0, 3, (5,), generator=self._generator)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
        loss.backward()
        if self._clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self._schedule.step()


def check_local_steps_beside_one_process() -> None:
    for clips, dtype, frozen in ((True, None, False), (False, torch.bfloat16, False), (True, None, True)):
        model = _small_model(frozen)
        training = _LocalTraining(model, hvd.rank(), clips, dtype)
        with hvd.LocalSGD(model, training.optimizer, sync_every=3, max_drift=math.inf):
            for _ in range(7):
                training.step()
        expected = _reference_of_local_steps(clips, dtype, frozen).state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


class _Branches(nn.Module):
    """Layers of which a step uses one besides the common one, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.common, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, inputs: Any, step: int) -> Any:
        return self.common(inputs) + self.branches[(step + hvd.rank()) % 4](inputs)


def _train_branches(model: Any, optimizer: Any, steps: int) -> Any:
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
        nn.functional.mse_loss(model(inputs, step), targets).backward()
        optimizer.step()
    return parameters_of(model)


def check_while_the_interval_is_one_step_every_optimizer_is_that_of_one_process() -> None:
    """Adam's moments are those of averaged gradients; a branch that other ranks use has their gradients."""
    for compression in (None, "bf16"):

        def made(model: nn.Module, compression: Any = compression) -> Any:
            if compression is None:
                return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
            # Adam's first step depends on the sign alone, and rounding may change that of tiny gradients.
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        local, common = _Branches(), _Branches()
        optimizer = made(local)
        with hvd.LocalSGD(local, optimizer, compression=compression):
            found = _train_branches(local, optimizer, PROBE - 1)
        optimizer = hvd.DistributedOptimizer(
            made(common), common.named_parameters(), compression=compression or "none"
        )
        expected = _train_branches(common, optimizer, PROBE - 1)
        assert torch.allclose(found, expected, atol=1e-6 if compression is None else 1e-3)
        assert torch.equal(local.unused.weight, _Branches().unused.weight), "no decay without a gradient"
