"""Jobs of checks of ringcomm.torch, and what ranks contribute, as tensors."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import torch

import ringcomm.torch as hvd
from tests.adapters import jobs


def run_checks(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run the modules' ``check_*`` functions in order, each from the same state of chance."""
    torch.set_num_threads(1)
    return jobs.run_checks(modules, before=lambda: torch.manual_seed(1234))


def run_on(ranks: int, *modules: str) -> None:
    """Run modules' checks as a job of so many processes, and fail if any has failed on any rank."""
    jobs.run_on(ranks, modules, run_checks)


def numbers(rank: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return what a rank contributes; every rank can compute those of the others."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-9, 10, tuple(shape), generator=generator)
    if dtype == torch.bool:
        return whole > 0
    whole = whole.abs() if dtype == torch.uint8 else whole
    return whole.to(dtype) / 4 if dtype.is_floating_point else whole.to(dtype)


def all_inputs(shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """All contributions, in float64, stacked."""
    return torch.stack([numbers(rank, shape, dtype, salt).double() for rank in range(hvd.size())])


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """The same up to the rounding of the result's own type."""
    exact = not result.dtype.is_floating_point
    target = expected.trunc() if exact else expected
    places = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}.get(result.dtype, 1e-12)
    torch.testing.assert_close(
        result.double(), target.double(), rtol=0 if exact else places, atol=0 if exact else places
    )


def same_everywhere(tensor: torch.Tensor) -> None:
    """Every rank has the same bits."""
    found = hvd.allgather_object(tensor.detach().double().numpy().tobytes())
    assert all(item == found[0] for item in found)
