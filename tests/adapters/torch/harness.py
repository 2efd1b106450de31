"""Jobs of checks of ringcomm.torch."""

from __future__ import annotations

from typing import Dict, Sequence

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


def same_everywhere(tensor: torch.Tensor) -> None:
    """Every rank has the same bits."""
    found = hvd.allgather_object(tensor.detach().double().numpy().tobytes())
    assert all(item == found[0] for item in found)
