"""Training recipes from seeds under ``DistributedOptimizer``, against one process with the whole batch.

A family of :mod:`tests.fuzz.agreeing`. A recipe is what public training scripts consist of: an optimizer of
PyTorch with any of its options, a kind of model, accumulation, clipping, loss scaling, autocast, averages of
weights, schedules, layers that are frozen at first, and a checkpoint from which training goes on. Each rank
also runs the recipe alone, on what all ranks have.
"""

from __future__ import annotations

import copy
import io
import random
import warnings
import zlib
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import ringcomm as rc
import ringcomm.torch as hvd
from tests.fuzz.agreeing_weights import delay

STEPS, WIDTH, CLASSES, WORDS = 6, 12, 5, 20
IMPLEMENTATIONS: List[Dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
ADAM: Dict[str, List[Any]] = {
    "lr": [0.01], "betas": [(0.9, 0.999), (0.5, 0.9)], "amsgrad": [False, True], "weight_decay": [0, 0.1],
    "maximize": [False, True],
}  # fmt: skip
OPTIMIZERS: Dict[str, Dict[str, List[Any]]] = {
    "SGD": {
        "lr": [0.05], "momentum": [0.9], "nesterov": [True], "weight_decay": [0, 0.1],
        "maximize": [False, True],
    },
    "Adam": ADAM,
    "AdamW": ADAM,
    "NAdam": {"lr": [0.01], "weight_decay": [0.1], "decoupled_weight_decay": [False, True]},
    "RAdam": {"lr": [0.01], "weight_decay": [0.1], "decoupled_weight_decay": [False, True]},
    "RMSprop": {"lr": [0.01], "centered": [False, True], "momentum": [0, 0.5], "weight_decay": [0, 0.1]},
    "Rprop": {"lr": [0.01], "maximize": [False, True]},
    "Adagrad": {
        "lr": [0.05], "lr_decay": [0, 0.1], "initial_accumulator_value": [0.1], "weight_decay": [0, 0.1],
    },
    "Adadelta": {"lr": [0.5], "weight_decay": [0, 0.1], "maximize": [False, True]},
    "Adamax": {"lr": [0.01], "weight_decay": [0, 0.1]},
    "ASGD": {"lr": [0.01], "t0": [2.0], "weight_decay": [0, 0.1]},
    "Adafactor": {"lr": [0.01], "weight_decay": [0, 0.1]},
    "Muon": {"lr": [0.02], "momentum": [0.9], "weight_decay": [0, 0.1]},
    "LBFGS": {"lr": [0.1], "max_iter": [3], "line_search_fn": [None, "strong_wolfe"]},
}  # fmt: skip
ONLY_FOREACH = ("NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "Adamax", "ASGD", "Adafactor")
SCHEDULES: Dict[str, Callable[[Any], Any]] = {
    "cosine": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(own, STEPS)], [2]
    ),
    "restarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 2),
    "lambda": lambda own: lr_scheduler.LambdaLR(own, lambda step: 0.9**step),
    "average": lambda own: swa_utils.SWALR(own, 0.02, anneal_epochs=2),
}


class Case(NamedTuple):
    """The program of a seed."""

    seed: int
    kind: str
    options: Dict[str, Any]
    model: str
    passes: int
    clip: str
    schedule: str
    average: str
    scale: bool
    overflows: int  # the step in which the last rank's gradients are infinite; -1: none
    resumes: int  # the step before which a checkpoint is loaded into new objects; -1: none
    thaws: int  # the step from which the first layer is trained
    by_hand: bool  # gradients come from torch.func, and the program assigns them
    autocast: bool
    to_none: bool
    arguments: Dict[str, Any]
    smoothing: float


def case_of(seed: int, size: int) -> Case:
    """The case of this seed, the same on every rank."""
    pick = random.Random(f"recipe {seed}")
    kind = pick.choice(list(OPTIMIZERS))
    options = {name: pick.choice(values) for name, values in OPTIMIZERS[kind].items()}
    if kind in ("SGD", "Adam", "AdamW", "Adagrad"):
        options.update(pick.choice(IMPLEMENTATIONS))
    elif kind in ONLY_FOREACH:
        options.update(pick.choice(IMPLEMENTATIONS[:3]))
    model = pick.choice(list(MODELS))
    if model == "complex" and (options.get("fused") or kind in ("Muon", "Adafactor", "LBFGS", "Rprop")):
        model = "mlp"
    if model == "conv" and kind == "LBFGS":  # it requires contiguous gradients
        model = "mlp"
    plain = kind != "LBFGS"
    # PyTorch 2.13 itself fails with a frozen convolution in another layout, and with fused SGD.
    # GradScaler refuses an optimizer without any gradient, as Muon's is while a tied embedding is frozen.
    thaws = plain and model != "conv" and kind != "Muon" and not (kind == "SGD" and options.get("fused"))
    passes = pick.choice((1, 1, 2, 3)) if plain else 1
    scale = plain and model != "complex" and pick.random() < 0.3
    by_hand = plain and model in ("mlp", "conv", "tied") and pick.random() < 0.3
    autocast = model in ("mlp", "conv") and kind in ("SGD", "AdamW") and pick.random() < 0.3
    return Case(
        seed, kind, options, model, passes if not by_hand else 1,
        pick.choice(("", "norm", "value" if model != "complex" else "norm")) if plain else "",
        pick.choice(("", *SCHEDULES)), pick.choice(("", "ema", "swa")), scale,
        pick.randrange(STEPS) if scale and pick.random() < 0.7 else -1,
        pick.randrange(1, STEPS) if pick.random() < 0.4 else -1,
        pick.choice((0, 0, 2)) if thaws else 0, by_hand, autocast, pick.random() < 0.6,
        pick.choice(({}, {}, {"groups": 2}, {"gradient_predivide_factor": float(size)}, {"op": hvd.Sum})),
        pick.choice((0.0, 0.1)),
    )  # fmt: skip


class Conv(nn.Module):
    """Convolutions whose weights are laid out with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 2, padding=1, groups=1)
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        image = numbers.reshape(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(torch.tanh(self.norm(self.first(image))).mean((2, 3)))


class Mlp(nn.Module):
    """Two layers, the second of which may be computed twice."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer, again: int = 0) -> None:
        super().__init__()
        self.first, self.norm = wrap(nn.Linear(WIDTH, 16)), nn.LayerNorm(16)
        self.last, self.again = nn.Linear(16, CLASSES), again

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.first(numbers)
        if not self.again:
            return self.last(torch.tanh(self.norm(hidden)))
        hidden = checkpoint(lambda given: torch.tanh(self.norm(given)), hidden, use_reentrant=self.again == 2)
        return self.last(hidden)


class Words(nn.Module):
    """An embedding, which is also the last layer if it is tied to it."""

    def __init__(self, tied: bool, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.body = nn.Embedding(WORDS, WIDTH), layer()
        self.last = nn.Linear(WIDTH, WORDS if tied else CLASSES)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = self.body(self.first(words))
        return self.last((found[0] if isinstance(found, tuple) else found).mean(1))[:, :CLASSES]


class Complex(nn.Module):
    """A layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8, dtype=torch.complex128)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(numbers.to(torch.complex128)).abs())


def _attention() -> nn.Module:
    # Without biases: gradients of those of keys are nothing but rounding, which optimizers scale up.
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, bias=False)


MODELS: Dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "weight_norm": lambda: Mlp(parametrizations.weight_norm),
    "orthogonal": lambda: Mlp(parametrizations.orthogonal),
    "recomputed": lambda: Mlp(again=1),
    "recomputed reentrantly": lambda: Mlp(again=2),
    "conv": Conv,
    "complex": Complex,
    "words": lambda: Words(False, nn.Identity),
    "tied": lambda: Words(True, nn.Identity),
    "attention": lambda: Words(False, _attention),
    "lstm": lambda: Words(True, lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: Words(False, lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
}


Batch = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Trainer:
    """A recipe on one model: alone on the batches of all ranks, or distributed on those of this rank."""

    def __init__(self, case: Case, size: int, distributed: bool) -> None:
        self.case, self.size, self.distributed = case, size, distributed
        self._make()
        if distributed:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + rc.rank())
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.averaged: Optional[Any] = None
        if case.average:
            function = swa_utils.get_ema_multi_avg_fn(0.8) if case.average == "ema" else None
            self.averaged = swa_utils.AveragedModel(self.model, multi_avg_fn=function)

    def _make(self) -> None:
        case = self.case
        torch.manual_seed(case.seed)
        self.model = MODELS[case.model]()
        if not case.autocast:
            self.model.double() if case.model != "complex" else self.model.last.double()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(case.thaws == 0 or not name.startswith("first"))
        trained = list(self.model.parameters())
        halves = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 0.003}]
        self.optimizers: List[Any] = []
        if case.kind == "Muon":
            matrices = [item for item in trained if item.dim() == 2]
            self._add("Muon", matrices, case.options)
            self._add("AdamW", [item for item in trained if item.dim() != 2], {"lr": 0.01})
        else:
            self._add(case.kind, trained if case.kind == "LBFGS" else halves, case.options)
        self.schedules = [SCHEDULES[case.schedule](own) for own in self.optimizers if case.schedule]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=case.scale)

    def _add(self, kind: str, parameters: List[Any], options: Dict[str, Any]) -> None:
        if not parameters:
            return
        own: Any = getattr(torch.optim, kind)(parameters, **options)
        if self.distributed:
            own = hvd.DistributedOptimizer(
                own, self.model.named_parameters(), backward_passes_per_step=self.case.passes,
                **self.case.arguments,
            )  # fmt: skip
        self.optimizers.append(own)

    def resume(self) -> None:
        """Save everything, make everything anew, and load it; the other ranks get the root's."""
        parts = {"model": self.model, "scaler": self.scaler}
        parts.update({f"own{number}": own for number, own in enumerate(self.optimizers)})
        parts.update({f"schedule{number}": own for number, own in enumerate(self.schedules)})
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        self._make()
        for number, own in enumerate(self.optimizers):
            if not self.distributed or rc.rank() == 0:
                own.load_state_dict(loaded[f"own{number}"])
            if self.distributed:
                hvd.broadcast_optimizer_state(own, root_rank=0)
        self.model.load_state_dict(loaded["model"])
        self.scaler.load_state_dict(loaded["scaler"])
        for number, schedule in enumerate(self.schedules):
            schedule.load_state_dict(loaded[f"schedule{number}"])

    def loss(self, batch: Batch, parameters: Optional[Dict[str, Any]] = None) -> torch.Tensor:
        """Return what is minimized on a batch."""
        words, numbers, labels = batch
        with torch.autocast("cpu", torch.bfloat16) if self.case.autocast else nullcontext():
            if parameters is None:
                outputs = self.model(words, numbers)
            else:
                outputs = torch.func.functional_call(self.model, parameters, (words, numbers))
        total = nn.functional.cross_entropy(outputs.double(), labels, label_smoothing=self.case.smoothing)
        return total if self.distributed or self.case.arguments.get("op") is hvd.Sum else total / self.size

    def _backward(self, batch: Batch) -> None:
        if not self.case.by_hand:
            self.scaler.scale(self.loss(batch)).backward()
            return
        wanted = {name: item for name, item in self.model.named_parameters() if item.requires_grad}
        given = {name: item.detach() for name, item in wanted.items()}
        found = torch.func.grad(lambda values: self.scaler.scale(self.loss(batch, values)))(given)
        for name, gradient in found.items():
            wanted[name].grad = gradient if wanted[name].grad is None else wanted[name].grad + gradient

    def step(self, batches: List[Batch]) -> None:
        """Train on some batches."""
        for own in self.optimizers:
            own.zero_grad(set_to_none=self.case.to_none)

        def compute() -> torch.Tensor:
            if self.case.kind == "LBFGS":
                self.optimizers[0].zero_grad()
            for batch in batches:
                self._backward(batch)
            total = torch.stack([self.loss(batch).detach() for batch in batches]).sum()
            op = self.case.arguments.get("op", hvd.Average)
            return hvd.allreduce(total, op=op) if self.distributed else total

        if self.case.kind == "LBFGS":
            self.optimizers[0].step(compute)
        else:
            compute()
            self._update()
        for schedule in self.schedules:
            schedule.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    def _update(self) -> None:
        # As Horovod's programs do, and in every other program with a scaler as those of one process.
        early = bool(self.case.clip) or self.case.scale
        early = early and not (self.case.scale and self.case.seed % 2)
        if early and self.distributed:
            for own in self.optimizers:
                own.synchronize()
        if self.case.clip:
            for own in self.optimizers:
                self.scaler.unscale_(own)
            clip = clip_grad_norm_ if self.case.clip == "norm" else clip_grad_value_
            clip(self.model.parameters(), 0.05)
        for own in self.optimizers:
            with own.skip_synchronize() if early and self.distributed else nullcontext():
                self.scaler.step(own)
        self.scaler.update()

    def prepare(self, step: int) -> None:
        """Do what the recipe does before a step: start from a checkpoint, train all layers from now on."""
        if step == self.case.resumes:
            self.resume()
        if step in (self.case.thaws, self.case.resumes) and step >= self.case.thaws:
            for parameter in self.model.parameters():
                parameter.requires_grad_()

    def values(self) -> Dict[str, torch.Tensor]:
        """Return what has to agree in the end."""
        found = dict(self.model.state_dict())
        if self.averaged is not None:
            found.update({f"averaged {name}": item for name, item in self.averaged.state_dict().items()})
        rates = torch.tensor([group["lr"] for own in self.optimizers for group in own.param_groups])
        return {**found, "rates": rates, "scale": torch.tensor(self.scaler.get_scale())}


class RecipeFamily:
    """Training recipes from seeds, against one process."""

    def run(self, seed: int) -> int:
        """Train a model; a digest of its parameters."""
        rank, size = rc.rank(), rc.size()
        case = case_of(seed, size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            warnings.filterwarnings("ignore", "The epoch parameter in")
            mine, reference = Trainer(case, size, True), Trainer(case, size, False)
            for step in range(STEPS):
                for trainer in (mine, reference):
                    trainer.prepare(step)
                delay(random.Random(f"{seed} {step} {rank}"))
                batches = [
                    [self._batch(case, step, number, other) for number in range(case.passes)]
                    for other in range(size)
                ]
                mine.step(batches[rank])
                reference.step([batch for of_rank in batches for batch in of_rank])
        digest, found = 0, mine.values()
        near = {"rtol": 0.02, "atol": 0.01} if case.autocast else {"rtol": 1e-6, "atol": 1e-8}
        for name, expected in reference.values().items():
            torch.testing.assert_close(found[name], expected, **near, msg=f"{name}: {case}")
            digest = zlib.crc32(copy.deepcopy(found[name]).contiguous().numpy().tobytes(), digest)
        return digest

    @staticmethod
    def _batch(case: Case, step: int, number: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(case.seed * 1000 + step * 100 + number * 10 + rank)
        dtype = torch.float32 if case.autocast else torch.float64
        numbers = torch.randn(4, WIDTH, generator=generator, dtype=dtype)
        if step == case.overflows and rank == rc.size() - 1:
            numbers[0] = float("inf")
        return (
            torch.randint(WORDS, (4, 3), generator=generator), numbers,
            torch.randint(CLASSES, (4,), generator=generator),
        )  # fmt: skip
