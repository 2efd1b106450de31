"""ringcomm.jax between real processes: one thread of XLA, random delays."""

from __future__ import annotations

import random
import time
from typing import Any, Dict, List, Sequence

import pytest

pytest.importorskip("jax")

from tests.adapters.jobs import run_checks, run_on  # noqa: E402 - it needs jax

SUBJECTS = ("collectives", "transformations", "training", "programs")
MODULES = [f"tests.adapters.jax.checks_{subject}" for subject in SUBJECTS]

QUICK_COMPILER = "--xla_backend_optimization_level=0"
ONE_THREAD = {
    "PJRT_NPROC": "1", "NPROC": "1",
    "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen=false {QUICK_COMPILER}",
}  # fmt: skip
TWO_THREADS = {"PJRT_NPROC": "2", "NPROC": "2"}


def run_delayed(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run checks where each collective starts after a random delay, another on each rank."""
    import ringcomm as rc
    from ringcomm._adapter.graph_callbacks import Batch
    from ringcomm.jax.host_call import HostCall

    rc.init()
    draw = random.Random(rc.rank())

    def delay(kind: Any, method: str) -> None:
        prompt = getattr(kind, method)

        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.001, 0.01)))
            return prompt(self, *args, **kwargs)

        setattr(kind, method, late)

    delay(Batch, "_submit")  # of calls outside of programs
    delay(HostCall, "run")
    return run_checks(modules)


@pytest.mark.smoke
def test_everything_on_two_ranks() -> None:
    run_on(2, MODULES, TEST_JIT="hvd", XLA_FLAGS=QUICK_COMPILER, **TWO_THREADS)


@pytest.mark.release
@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "subjects"), [(1, ["collectives", "training", "programs"]), (4, ["collectives"])]
)
def test_on_other_numbers_of_ranks(ranks: int, subjects: List[str]) -> None:
    """What differs on more than the three ranks below is which ranks collectives connect."""
    modules = [module for module in MODULES if module.rpartition("_")[2] in subjects]
    assert len(modules) == len(subjects)
    run_on(ranks, modules, XLA_FLAGS=QUICK_COMPILER, **TWO_THREADS)


@pytest.mark.release
@pytest.mark.parametrize(("jit", "ranks"), [("hvd", 3), pytest.param("jax", 2, marks=pytest.mark.full)])
def test_everything_with_one_thread_and_random_delays(jit: str, ranks: int) -> None:
    run_on(ranks, MODULES, run_delayed, TEST_JIT=jit, **ONE_THREAD)
