"""ringcomm.mlx between real processes: collectives, training, a lost rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from tests.adapters.jobs import check_a_lost_rank, run_on  # noqa: E402
from tests.adapters.signatures import COMMON, differences, differences_of_options  # noqa: E402
from tests.proc.test_ringrun_support import ROOT, Launched  # noqa: E402

CHECKS = [f"tests.adapters.mlx.checks_{subject}" for subject in ("collectives", "training")]


def test_signatures() -> None:
    import ringcomm.mlx as hvd

    assert differences(hvd, COMMON) == []
    assert differences_of_options(hvd, "ringcomm.mlx") == []


@pytest.mark.smoke
def test_everything_on_two_ranks() -> None:
    run_on(2, CHECKS)


@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 3])
def test_everything_on_other_numbers_of_ranks(ranks: int) -> None:
    run_on(ranks, CHECKS)


def step_of_gradients() -> Any:
    """A function that averages gradients."""
    import mlx.core as mx

    import ringcomm.mlx as hvd

    return lambda: hvd.average_gradients({"w": mx.ones((1000, 100))})


def test_a_lost_rank_is_named_to_all_others(tmp_path: Path) -> None:
    """MLX's own ring reports a lost connection, and not whose."""
    check_a_lost_rank(step_of_gradients, tmp_path)


def test_the_program_on_the_page(tmp_path: Path) -> None:
    (script,) = re.findall(
        r"```python\n(# mlx_train.py\n.*?)```", (ROOT / "docs" / "jax.md").read_text(), re.DOTALL
    )
    (tmp_path / "mlx_train.py").write_text(script)
    job = Launched("-np", "2", str(tmp_path / "mlx_train.py"))
    assert job.finish(100.0) == 0, job.err
    assert float(job.out.split()[-1]) < 0.5, job.out
