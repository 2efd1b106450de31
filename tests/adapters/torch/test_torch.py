"""ringcomm.torch, between real processes: collectives, errors and training, on several numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringcomm as rc
from ringrun.function import RemoteError

pytest.importorskip("torch")

from tests.adapters.torch.harness import run_on  # noqa: E402 - it needs torch


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    run_on(ranks, "tests.adapters.torch.checks_collectives", "tests.adapters.torch.checks_training")


def lose_a_rank(notes: str) -> None:
    """Rank 1 vanishes in the middle of training; the others write down what they are told."""
    import os

    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(30)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), groups=30)
    try:
        for step in range(1000):
            optimizer.zero_grad()
            model(torch.ones(2, 20)).sum().backward()
            if step == 3 and hvd.rank() == 1:
                os._exit(7)
            optimizer.step()
    except hvd.HorovodInternalError as error:
        kind = "recoverable" if isinstance(error, rc.Recoverable) else type(error).__name__
        Path(notes, str(hvd.rank())).write_text(f"{kind}: {error}")
        raise


@pytest.mark.slow
def test_a_lost_rank_is_the_same_recoverable_error_for_all_others(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="rank 1"):
        rc.run(lose_a_rank, (str(tmp_path),), np=3, timeout_s=30.0, env={"OMP_NUM_THREADS": "1"})
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(said) == ["0", "2"]
    assert said["0"] == said["2"]
    assert said["0"].startswith("recoverable: rank 1")
