"""Real processes for checks: all checks of a module run in one job, because starting one takes seconds."""

from __future__ import annotations

import importlib
import random
import sys
import time
import traceback
from typing import Any, Dict, List, Sequence

import torch

import ringcomm as rc
import ringcomm.torch as hvd

LIMIT_S = 60.0


def run_checks(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run the modules' ``check_*`` functions in order; what became of each."""
    torch.set_num_threads(1)
    checks = {
        name: item
        for module in modules
        for name, item in vars(importlib.import_module(module)).items()
        if name.startswith("check_")
    }
    outcome: Dict[str, str] = {}
    hvd.init()
    for name, check in checks.items():
        torch.manual_seed(1234)
        started = time.perf_counter()
        try:
            check()
            hvd.barrier()
        except Exception:  # noqa: BLE001 - reported by the test
            outcome[name] = traceback.format_exc()
            print(f"{name}: {outcome[name]}", file=sys.stderr)  # the others may be left waiting, and fail
            break
        outcome[name] = f"ok {time.perf_counter() - started:.2f} s"
    hvd.shutdown()
    return outcome


def run_on(ranks: int, *modules: str) -> None:
    """Run modules' checks as a job of so many processes, and fail if any has failed on any rank."""
    outcomes: List[Dict[str, str]] = rc.run(
        run_checks, (modules,), np=ranks, timeout_s=LIMIT_S, start_timeout_s=LIMIT_S,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert len(outcomes) == ranks
    assert len(outcomes[0]) > 1
    for name, result in outcomes[0].items():
        print(f"{name} {result if result.startswith('ok') else 'failed'}")
    bad = [
        f"rank {rank}: {name}: {result}"
        for rank, outcome in enumerate(outcomes)
        for name, result in outcome.items()
        if not result.startswith("ok")
    ]
    assert not bad, "\n".join(bad)


def dawdle(chance: random.Random) -> None:
    """Be late now and then."""
    if chance.random() < 0.2:
        time.sleep(chance.random() * 0.003)


def numbers(rank: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank contributes; every rank can compute those of the others."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    whole = torch.randint(-9, 10, tuple(shape), generator=generator)
    if dtype == torch.bool:
        return whole > 0
    if dtype == torch.uint8:
        return whole.abs().to(dtype)
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


def with_errors(kind, function, text="") -> BaseException:
    try:
        function()
    except kind as error:
        assert text.lower() in str(error).lower(), error
        return error
    raise AssertionError(f"no {kind} was raised")
