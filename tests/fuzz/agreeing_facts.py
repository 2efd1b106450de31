"""Models whose gradients are other ones on each rank: absent, sparse or dense, of another layout or type.

A family of :mod:`tests.fuzz.agreeing`. What a rank's own gradients are in a step decides nothing: each rank
also trains the model alone, on what all ranks have, with PyTorch's own optimizer, and the ranks' weights have
the same bits. Parameters are trained later, too, by a rank that uses them before the others.
"""

from __future__ import annotations

import copy
import random
import zlib
from typing import Any, Dict, List, NamedTuple

import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd
from tests.fuzz.agreeing import delay

STEPS, ROWS = 4, 7
OPTIMIZERS: Dict[str, Dict[str, Any]] = {"SGD": {"lr": 0.05, "momentum": 0.5}, "Adagrad": {"lr": 0.05}}


class Own(hvd.Compression.none):
    """A compression of the program's own: gradients are reduced separately."""


LOSSY = (hvd.Compression.bf16, hvd.Compression.int8)


class Use(NamedTuple):
    """What a rank uses in a step, in this order; all false: it makes no backward pass."""

    table: bool
    whole_table: bool
    image: bool
    late: bool


class Case(NamedTuple):
    """The program of a seed."""

    seed: int
    kind: str
    options: Dict[str, Any]
    late: str  # how the last layer comes in later: thawed, added, or from the start
    last_type: torch.dtype  # of the parameters in the last step
    steps: List[List[Use]]  # uses by step and rank

    @property
    def tolerances(self) -> Dict[str, float]:
        """Of the comparison with one process; Adagrad enlarges what a codec loses of small gradients."""
        if self.options.get("compression") in LOSSY:
            return {"rtol": 0.0, "atol": 0.1 * STEPS}
        is_double = self.last_type == torch.float64
        return {"rtol": 1e-9, "atol": 1e-11} if is_double else {"rtol": 1e-4, "atol": 1e-5}

    @property
    def dense(self) -> bool:
        """Whether the program asks for dense gradients."""
        return bool(self.options.get("sparse_as_dense"))


def case_of(seed: int, size: int) -> Case:
    """The case of this seed, the same on every rank."""
    pick = random.Random(f"facts {seed}")
    kind = pick.choice(list(OPTIMIZERS))
    options: Dict[str, Any] = {}
    if pick.random() < 0.3:
        options["sparse_as_dense"] = True
    if pick.random() < 0.6:
        options["compression"] = pick.choice((Own, *LOSSY))
    if pick.random() < 0.3:
        options["groups"] = pick.choice((1, 2))
    # Momentum of SGD cannot be sparse in one step and dense in another.
    mixed = kind != "SGD" or bool(options.get("sparse_as_dense"))
    likely = pick.choice((0.2, 0.5, 0.8))

    def use() -> Use:
        found = [pick.random() < likely for _ in Use._fields]
        return Use(found[0], found[1] and mixed and pick.random() < 0.4, found[2], found[3])

    steps = [[use() for _ in range(size)] for _ in range(STEPS)]
    late = pick.choice(("", "thawed", "added"))
    last_type = pick.choice((torch.float64, torch.float64, torch.float32))
    return Case(seed, kind, options, late, last_type, steps)


class Model(nn.Module):
    """A table of rows, weights of an image with channels last, and a layer that may come later."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, sparse=sparse)
        self.image = nn.Conv2d(3, 4, 2)
        self.late = nn.Linear(5, 4)
        self.double()
        self.image.to(memory_format=torch.channels_last)

    def loss(self, use: Use, place: int) -> torch.Tensor:
        """A number that depends on what is used."""
        parts = []
        dtype = self.image.weight.dtype
        if use.table:
            words = torch.tensor([place % ROWS, (2 * place) % ROWS, place % ROWS])
            parts.append(self.table(words).square().sum())
        if use.whole_table:
            parts.append((self.table.weight * 0.1 * (place + 1)).tanh().sum())
        if use.image:
            generator = torch.Generator().manual_seed(place)
            pixels = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
            parts.append(self.image(pixels.to(dtype)).square().mean())
        if use.late and self.late.weight.requires_grad:
            parts.append(self.late(torch.full((1, 5), 0.3 * (place + 1), dtype=dtype)).square().sum())
        return torch.stack(parts).sum() if parts else torch.zeros(())


def made(case: Case) -> Any:
    """A model and PyTorch's optimizer for it."""
    torch.manual_seed(case.seed)
    model = Model(sparse=not case.dense)
    if case.late == "thawed":
        model.late.requires_grad_(False)
    chosen = [item for name, item in model.named_parameters() if case.late != "added" or "late" not in name]
    return model, getattr(torch.optim, case.kind)(chosen, **copy.deepcopy(OPTIMIZERS[case.kind]))


def comes_later(case: Case, model: Model, optimizer: Any) -> None:
    """Train the last layer from now on."""
    if case.late == "added":
        optimizer.add_param_group({"params": list(model.late.parameters())})
    elif case.late == "thawed":
        model.late.requires_grad_(True)


def lay_out_anew(model: Model, pick: random.Random) -> None:
    """Give gradients of this rank another layout, which changes none of their numbers."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or pick.random() < 0.5:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient.to_dense() if pick.random() < 0.2 else gradient
        elif gradient.dim() > 1:
            order = list(range(gradient.dim()))
            pick.shuffle(order)
            back = [order.index(place) for place in range(gradient.dim())]
            parameter.grad = gradient.permute(order).contiguous().permute(back)


class FactsFamily:
    """Unequal local facts of gradients, against one process."""

    def run(self, seed: int) -> int:
        """Train a model; a digest of its parameters."""
        rank, size = rc.rank(), rc.size()
        case = case_of(seed, size)
        (model, own), (reference, alone) = made(case), made(case)
        optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), **case.options)
        pick = random.Random(f"{seed} {rank}")
        for step, uses in enumerate(case.steps):
            if step == 2:
                comes_later(case, model, optimizer)
                comes_later(case, reference, alone)
            optimizer.zero_grad()
            alone.zero_grad()
            if step == STEPS - 1:
                model.to(case.last_type)
                reference.to(case.last_type)
            delay(pick)
            for each, use in enumerate(uses):
                place = step * size + each
                loss = reference.loss(use, place)
                if loss.requires_grad:
                    (loss / size).backward()
                    if each == rank:
                        model.loss(use, place).backward()
            if case.kind != "SGD":
                lay_out_anew(model, pick)
            optimizer.step()
            alone.step()
        state = model.state_dict()
        digest = 0
        for name, expected in reference.state_dict().items():
            torch.testing.assert_close(state[name], expected, **case.tolerances, msg=f"{name}: {case}")
            digest = zlib.crc32(state[name].numpy().tobytes(), digest)
        return digest
