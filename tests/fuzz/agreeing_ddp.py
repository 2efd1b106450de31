"""Models from seeds under PyTorch's ``DistributedDataParallel`` over ringcomm, against one process.

A family of :mod:`tests.fuzz.agreeing`. Each rank also trains the model alone, on what all ranks have.
"""

from __future__ import annotations

import random
import zlib
from contextlib import ExitStack, nullcontext
from typing import Any, Dict, List, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcomm as rc
import ringcomm.torch.distributed  # noqa: F401 - it registers the backend
from tests.fuzz.agreeing_models import OPTIMIZERS, SAMPLES, Model
from tests.fuzz.agreeing_weights import delay


class Case(NamedTuple):
    """The program of a seed."""

    seed: int
    kind: str
    options: Dict[str, Any]
    ddp: Dict[str, Any]
    width: int
    branches: int
    passes: List[int]  # by step, the backward passes; all but the last within no_sync()
    steps: List[int]  # by rank; unequal ones within join()
    zero: bool
    clip: bool
    average: bool


def case_of(seed: int, size: int) -> Case:
    """The case of this seed, the same on every rank."""
    pick = random.Random(f"ddp {seed}")
    kind = pick.choice(list(OPTIMIZERS))
    branches = pick.randrange(3)
    static = branches == 0 and pick.random() < 0.3
    ddp = {
        "find_unused_parameters": branches > 0, "static_graph": static,
        "gradient_as_bucket_view": pick.random() < 0.5, "bucket_cap_mb": pick.choice((25.0, 0.0001, 0.001)),
    }  # fmt: skip
    uneven = branches == 0 and not static and pick.random() < 0.4
    steps = [pick.randint(1, 5) if uneven else 4 for _ in range(size)]
    passes = [1 if uneven or static else pick.choice((1, 1, 2)) for _ in range(max(steps))]
    return Case(
        seed, kind, dict(OPTIMIZERS[kind]), ddp, pick.choice((1, 3, 16)), branches, passes, steps,
        pick.random() < 0.7, not uneven and pick.random() < 0.3, uneven and pick.random() < 0.5,
    )  # fmt: skip


class Whole(Model):
    """The model of the other family without the layer that is added later, which would stay unused."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed)
        super().__init__(case.width, case.branches)
        del self.extra


class DdpFamily:
    """PyTorch's own wrapper over the process group."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("ringcomm")

    def run(self, seed: int) -> int:
        """Train a model; a digest of its parameters."""
        case = case_of(seed, rc.size())
        mine, reference = Whole(case), Whole(case)
        if rc.rank():
            with torch.no_grad():
                mine.scale.add_(rc.rank())
        wrapped = DistributedDataParallel(mine, **case.ddp)
        own = getattr(torch.optim, case.kind)(wrapped.parameters(), **case.options)
        other = getattr(torch.optim, case.kind)(reference.parameters(), **case.options)
        generator = torch.Generator().manual_seed(seed)
        samples = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        joined = (
            wrapped.join(divide_by_initial_world_size=not case.average)
            if len(set(case.steps)) > 1
            else nullcontext()
        )
        with joined:
            for step in range(case.steps[rc.rank()]):
                self._step(case, step, wrapped, own, samples)
        for step in range(max(case.steps)):
            self._alone(case, step, reference, other, samples)
        digest = 0
        expected = reference.state_dict()
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9, msg=f"{name}: {case}")
            digest = zlib.crc32(value.numpy().tobytes(), digest)
        return digest

    def _indices(self, case: Case, step: int, number: int, rank: int) -> List[int]:
        return random.Random(f"{case.seed} {step} {number} {rank}").sample(range(SAMPLES), 3)

    def _step(self, case: Case, step: int, wrapped: Any, optimizer: Any, samples: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=case.zero)
        delay(random.Random(f"{case.seed} {step} {rc.rank()}"))
        for number in range(case.passes[step]):
            indices = self._indices(case, step, number, rc.rank())
            with ExitStack() as stack:
                if number + 1 < case.passes[step]:
                    stack.enter_context(wrapped.no_sync())
                wrapped(samples[indices], indices, False).square().mean().backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()

    def _alone(self, case: Case, step: int, model: Whole, optimizer: Any, samples: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=case.zero)
        ranks = [rank for rank, steps in enumerate(case.steps) if step < steps]
        count = len(ranks) if case.average else len(case.steps)
        for rank in ranks:
            for number in range(case.passes[step]):
                indices = self._indices(case, step, number, rank)
                (model(samples[indices], indices, False).square().mean() / count).backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
