"""ringcomm.jax between real processes: both ways to the host, one thread of XLA, random delays."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.adapters.jax.harness import MODULES, run_delayed  # noqa: E402 - it needs jax
from tests.adapters.jobs import run_on  # noqa: E402

ONE_THREAD = {"PJRT_NPROC": "1", "NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
TWO_THREADS = {"PJRT_NPROC": "2", "NPROC": "2"}


@pytest.mark.parametrize(
    "ranks", [
        pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.smoke),
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_everything_on_buffers(ranks: int) -> None:
    run_on(ranks, MODULES, RINGCOMM_JAX_CALLBACKS="buffers", **TWO_THREADS)


@pytest.mark.parametrize("callbacks", ["buffers", "io_callback"])
def test_everything_with_one_thread_and_random_delays(callbacks: str) -> None:
    ranks = 3 if callbacks == "buffers" else 2
    run_on(ranks, MODULES, run_delayed, RINGCOMM_JAX_CALLBACKS=callbacks, **ONE_THREAD)
