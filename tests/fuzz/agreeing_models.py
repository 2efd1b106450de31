"""Models from seeds under ``DistributedOptimizer``, against one process.

A family of :mod:`tests.fuzz.agreeing`. Each rank also trains the model alone, on what all ranks have, with
PyTorch's own optimizer. Parameters without dimensions, branches that depend on a rank's own data, empty
shares, learning rates that are tensors, schedules, hooks, parameters that are added later, and gradients that
become zero or None between steps must not make a difference.
"""

from __future__ import annotations

import copy
import random
import zlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd
from tests.fuzz.agreeing_weights import delay

SAMPLES, STEPS = 40, 5
OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.2},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 0.05, "weight_decay": 0.1},
    "Adadelta": {"lr": 0.5, "maximize": True},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 2.0},
}
SCHEDULES: Dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
}


class Case(NamedTuple):
    """The program of a seed."""

    seed: int
    kind: str
    options: Dict[str, Any]
    schedule: str
    speeds: Optional[List[float]]  # by rank, for proportional shares of each batch; None: equal ones
    batch: int  # samples of all ranks together
    passes: int
    width: int
    branches: int  # each is used by a rank whose samples have a certain remainder
    zero: str  # how gradients are reset
    idle: bool  # ranks with an empty share make a backward pass, which gives zeros
    hooks: bool
    adds: int  # the step before which a layer is added; -1: none
    groups: Optional[int]


def case_of(seed: int, size: int) -> Case:
    """The case of this seed, the same on every rank."""
    pick = random.Random(f"model {seed}")
    kind = pick.choice(list(OPTIMIZERS))
    options = copy.deepcopy(OPTIMIZERS[kind])
    if kind in ("Adam", "AdamW") and pick.random() < 0.4:
        options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
    speeds = [pick.choice((1.0, 2.0, 20.0, 50.0)) for _ in range(size)] if pick.random() < 0.6 else None
    passes = pick.choice((1, 1, 2)) if speeds is None else 1
    return Case(
        seed, kind, options, pick.choice(["", *SCHEDULES]), speeds, pick.choice((size, 5, 8, 13)), passes,
        pick.choice((1, 3, 16)), pick.randrange(3), pick.choice(("none", "zeros", "model")),
        pick.random() < 0.5, pick.random() < 0.3, pick.choice((-1, -1, 1, 3)),
        pick.choice((None, None, 1, 3)),
    )  # fmt: skip


class Model(nn.Module):
    """Branches between two layers, and a factor without dimensions."""

    def __init__(self, width: int, branches: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(2, 2)
        self.double()

    def forward(self, samples: torch.Tensor, indices: Sequence[int], with_extra: bool) -> torch.Tensor:
        found = torch.tanh(self.first(samples))
        for number, branch in enumerate(self.branches):
            if any(index % (number + 2) == 0 for index in indices):
                found = found + branch(found)
        found = self.last(found) * self.scale
        return self.extra(found) if with_extra else found


class Trainer:
    """A model, and its optimizer with what belongs to it."""

    def __init__(self, case: Case, model: Model, optimizer: Any) -> None:
        self.case, self.model, self.optimizer = case, model, optimizer
        self.seen: List[int] = []
        self.schedule = SCHEDULES[case.schedule](optimizer) if case.schedule else None
        if case.hooks:
            optimizer.register_step_pre_hook(lambda *_: self.seen.append(0))
            optimizer.register_step_post_hook(self._shrink)

    def _shrink(self, *_: Any) -> None:
        self.seen.append(1)
        with torch.no_grad():
            self.model.first.weight.mul_(0.99)

    def forget(self) -> None:
        """Forget the gradients of the last step."""
        if self.case.zero == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.case.zero == "none")

    def add(self) -> None:
        """Train one more layer from now on."""
        self.optimizer.add_param_group({"params": list(self.model.extra.parameters()), "lr": 0.03})

    def step(self) -> None:
        """Update the model."""
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


def made(case: Case) -> Any:
    """A model and PyTorch's optimizer for all of it but the layer that may be added."""
    torch.manual_seed(case.seed)
    model = Model(case.width, case.branches)
    parameters = [item for name, item in model.named_parameters() if not name.startswith("extra")]
    return model, getattr(torch.optim, case.kind)(parameters, **copy.deepcopy(case.options))


class ModelFamily:
    """Models from seeds, against one process."""

    def run(self, seed: int) -> int:
        """Train a model; a digest of its parameters."""
        rank, size = rc.rank(), rc.size()
        case = case_of(seed, size)
        model, own = made(case)
        reference = Trainer(case, *made(case))
        if rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(rank)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        batches = None
        if case.speeds is not None:
            batches = rc.balanced(SAMPLES, global_batch=case.batch, seed=seed, speeds=case.speeds)
        optimizer = hvd.DistributedOptimizer(
            own, model.named_parameters(), backward_passes_per_step=case.passes, groups=case.groups,
            batches=batches,
        )  # fmt: skip
        mine = Trainer(case, model, optimizer)
        generator = torch.Generator().manual_seed(seed)
        samples = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        for step, shares in zip(range(STEPS), self._shares(case, batches)):
            if step == case.adds:
                mine.add()
                reference.add()
            self._step(case, step, mine, reference, samples, shares)
        state = model.state_dict()
        assert mine.seen == reference.seen, case
        digest = 0
        for name, expected in reference.model.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-7, atol=1e-9, msg=f"{name}: {case}")
            digest = zlib.crc32(state[name].numpy().tobytes(), digest)
        return digest

    def _shares(self, case: Case, batches: Any) -> Any:
        """For each step and pass, the samples of each rank."""
        if batches is not None:
            while True:
                for indices in batches:
                    yield [rc.allgather_object([int(index) for index in indices])]
        pick = random.Random(f"samples {case.seed}")
        while True:
            yield [
                [pick.sample(range(SAMPLES), 3) for _ in range(rc.size())] for _ in range(case.passes)
            ]

    def _step(
        self, case: Case, step: int, mine: Trainer, reference: Trainer, samples: torch.Tensor, shares: Any
    ) -> None:
        with_extra = 0 <= case.adds <= step
        for trainer in (mine, reference):
            trainer.forget()
        for parts in shares:
            delay(random.Random(f"{case.seed} {step} {rc.rank()}"))
            total = sum(map(len, parts))
            for rank, part in enumerate(parts):
                if not part and not case.idle:
                    continue
                # What is computed for nothing counts nothing, but it gives its parameters gradients.
                inputs, indices = samples[part or [0]], part or [step]
                if rank == rc.rank():
                    outputs = mine.model(inputs, indices, with_extra)
                    (outputs.square().mean() if part else outputs.sum() * 0.0).backward()
                outputs = reference.model(inputs, indices, with_extra)
                (outputs.square().mean() * (len(part) / total)).backward()
        mine.step()
        reference.step()
