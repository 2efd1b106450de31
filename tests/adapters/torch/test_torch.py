"""ringcomm.torch, between real processes: collectives, errors and training, on several numbers of ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.adapters.torch.harness import run_on  # noqa: E402 - it needs torch


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    run_on(ranks, "tests.adapters.torch.checks_collectives", "tests.adapters.torch.checks_training")
