"""Local steps from seeds, of NumPy arrays and of PyTorch's models, against one process.

A family of :mod:`tests.fuzz.agreeing`. Each rank also trains the models of all ranks, and brings them
together by the formulas in the documentation of :class:`~ringcomm._adapter.local_sgd.LocalSGD`.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np
import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd
from tests.fuzz.agreeing_weights import delay

OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}, "Adagrad": {"lr": 0.03},
}  # fmt: skip


class Case(NamedTuple):
    """The program of a seed."""

    seed: int
    arrays: bool
    kind: str
    every: List[int]  # by rank, the local steps between two synchronizations
    periods: int  # number of these
    rest: int  # local steps after the last period
    fragments: int
    overlap: int
    outer_lr: float
    outer_momentum: float
    zero: bool
    branches: int


def case_of(seed: int, size: int) -> Case:
    """The case of this seed, the same on every rank."""
    pick = random.Random(f"local {seed}")
    equal = pick.random() < 0.6
    every = [pick.choice((1, 2, 3, 4))] * size if equal else [pick.choice((2, 3, 4)) for _ in range(size)]
    streams = equal and pick.random() < 0.5
    return Case(
        seed, pick.random() < 0.4, pick.choice(list(OPTIMIZERS)), every, pick.choice((1, 2, 3)),
        pick.choice((0, 0, 1)) if equal and every[0] > 1 else 0,
        pick.randint(1, every[0]) if streams else 1, pick.randrange(every[0]) if streams else 0,
        pick.choice((0.7, 1.0)), pick.choice((0.0, 0.5, 0.9)), pick.random() < 0.5, pick.randrange(3),
    )  # fmt: skip


class Model(nn.Module):
    """Branches that depend on the samples, a factor and a statistic without dimensions, a frozen layer."""

    def __init__(self, seed: int, branches: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.frozen = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(branches))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.tensor(0.0))
        self.double()
        self.frozen.requires_grad_(False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.first(samples))
        for number, branch in enumerate(self.branches):
            if samples.sum() > number - 0.5:
                found = found + branch(found)
        self.mean += 0.1 * (samples.mean() - self.mean)
        return self.frozen(self.last(found) * self.scale)


class Trainer:
    """A model and an optimizer; NumPy programs train its parameters as arrays of their own."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.model = Model(case.seed, case.branches)
        self.optimizer = getattr(torch.optim, case.kind)(self.model.parameters(), **OPTIMIZERS[case.kind])
        self.weights = [item.detach() for item in self.model.parameters() if item.requires_grad]
        self.steps = 0

    def step(self) -> None:
        """One local step on samples of its own."""
        generator = torch.Generator().manual_seed(self.case.seed * 1000 + self.rank * 100 + self.steps)
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=self.case.zero)
        self.model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
        self.optimizer.step()


class Outer:
    """What LocalSGD promises, for the models of all ranks in one process."""

    def __init__(self, trainers: Sequence[Trainer], case: Case, fragments: Sequence[Sequence[int]]) -> None:
        self.trainers, self.case, self.fragments = trainers, case, fragments
        self.anchors = [item.clone() for item in trainers[0].weights]
        self.velocities = [torch.zeros_like(item) for item in self.anchors]
        self.running: Dict[int, Any] = {}

    def begin(self, number: int, step: int) -> None:
        """Average what the ranks have changed in a fragment."""
        kept = {
            place: [item.weights[place].clone() for item in self.trainers]
            for place in self.fragments[number]
        }
        means = [item.model.mean.clone() for item in self.trainers]
        self.running[number] = step + self.case.overlap, kept, means

    def mean(self, parts: Sequence[Any]) -> Any:
        """The mean over ranks, by the steps that they make in an interval."""
        every = self.case.every
        return sum(steps * part for steps, part in zip(every, parts)) / sum(every)

    def end(self, number: int) -> None:
        """The outer step of a fragment: Nesterov's momentum on the mean of the deltas."""
        _, kept, means = self.running.pop(number)
        case = self.case
        for place, before in kept.items():
            delta = self.mean([self.anchors[place] - item for item in before])
            self.velocities[place] = case.outer_momentum * self.velocities[place] + delta
            nesterov = delta + case.outer_momentum * self.velocities[place]
            self.anchors[place] = self.anchors[place] - case.outer_lr * nesterov
            for item, started in zip(self.trainers, before):
                item.weights[place].copy_(self.anchors[place] + (item.weights[place] - started))
        if number == len(self.fragments) - 1:
            for item, started in zip(self.trainers, means):
                item.model.mean.copy_(self.mean(means) + (item.model.mean - started))

    def after(self, step: int) -> None:
        """A step has been made by all ranks (or a period, where they make unequal numbers)."""
        for number in [number for number, item in self.running.items() if item[0] <= step]:
            self.end(number)
        every = self.case.every[0] if len(set(self.case.every)) == 1 else 1
        for number in range(len(self.fragments)):
            if (step - 1) % every + 1 == every * (number + 1) // len(self.fragments):
                self.begin(number, step)
                if not self.case.overlap:
                    self.end(number)

    def synchronize(self) -> None:
        """All fragments, now."""
        for number in list(self.running):
            self.end(number)
        for number in range(len(self.fragments)):
            self.begin(number, 0)
            self.end(number)

    def run(self) -> None:
        """All local steps of all ranks."""
        case = self.case
        equal = len(set(case.every)) == 1
        for period in range(case.periods * (case.every[0] if equal else 1) + case.rest):
            for item in self.trainers:
                for _ in range(1 if equal else case.every[item.rank]):
                    item.step()
            self.after(period + 1)
        if case.rest or case.overlap or case.fragments > 1:
            self.synchronize()


class LocalFamily:
    """``rc.LocalSGD`` on arrays, and ``hvd.LocalSGD`` on models."""

    def run(self, seed: int) -> int:
        """Train; a digest of the parameters."""
        case = case_of(seed, rc.size())
        mine = Trainer(case, rc.rank())
        options = {
            "sync_every": case.every[0] if len(set(case.every)) == 1 else case.every,
            "outer_lr": case.outer_lr, "outer_momentum": case.outer_momentum, "fragments": case.fragments,
            "overlap": case.overlap, "max_drift": math.inf,
        }  # fmt: skip
        core = self._arrays(case, mine, options) if case.arrays else self._model(case, mine, options)
        outer = Outer([Trainer(case, rank) for rank in range(rc.size())], case, core._fragments)
        outer.run()
        expected = outer.trainers[rc.rank()].model.state_dict()
        digest = 0
        for name, value in mine.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=f"{name}: {case}")
            digest = zlib.crc32(value.numpy().tobytes(), digest)
        return digest

    def _count(self, case: Case) -> int:
        return case.periods * case.every[rc.rank()] + case.rest

    def _model(self, case: Case, mine: Trainer, options: Dict[str, Any]) -> Any:
        if rc.rank():
            with torch.no_grad():
                mine.model.first.weight.add_(rc.rank())
        with hvd.LocalSGD(mine.model, mine.optimizer, **options) as local:
            for _ in range(self._count(case)):
                delay(random.Random(f"{case.seed} {rc.rank()} {mine.steps}"))
                mine.step()
        return local.core

    def _arrays(self, case: Case, mine: Trainer, options: Dict[str, Any]) -> Any:
        """PyTorch only computes; the weights are NumPy arrays that share its memory."""
        weights: List[np.ndarray[Any, Any]] = [item.numpy() for item in mine.weights]
        local = rc.LocalSGD(weights, averaged=[mine.model.mean.numpy()], **options)  # type: ignore[arg-type]
        for _ in range(self._count(case)):
            mine.step()
            local.step()
        if local.steps:
            local.synchronize()
        return local
