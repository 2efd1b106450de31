"""Averages of metrics over ranks, which are threads here."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm._adapter.callbacks import averaged
from ringcomm.config import Settings
from ringcomm.errors import MismatchError


@pytest.fixture
def on_three(ranks_of):
    """Runs a function on three ranks, with ``api`` as in a process of its own; the results in rank order."""
    # Threads that other tests have left might still call something, so that only a stall is certain.
    settings = Settings(late_after_s=5.0, spin_us=0.0)
    return lambda function: ranks_of(3, lambda context: function(context.rank), settings=settings)


def test_numbers_are_averaged_and_the_rest_is_left_out(on_three):
    def metrics(rank):
        numbers = {"loss": np.float32(rank), "acc": rank == 0, "lr": 0.5}
        return {**numbers, "name": "a", "all": np.zeros(2), "no": None}

    found = on_three(lambda rank: averaged(metrics(rank)))
    assert found == [{"acc": pytest.approx(1 / 3), "loss": 1.0, "lr": 0.5}] * 3


def test_what_was_trained_is_weighted_by_samples(on_three):
    """Those of validation are not: every rank validates on the same."""
    samples = [1, 2, 5]
    both = ("loss", "val_loss")
    found = on_three(lambda rank: averaged(dict.fromkeys(both, float(rank)), samples=samples[rank]))
    assert found == [{"loss": pytest.approx(12 / 8), "val_loss": 1.0}] * 3
    assert list(on_three(lambda rank: averaged({"loss": 1.0}, samples=rank))[0]) == ["loss"]


def test_ranks_with_different_metrics_get_an_error(on_three):
    def work(rank):
        with pytest.raises(MismatchError, match="metrics"):
            averaged({"loss": 1.0} if rank else {"loss": 1.0, "acc": 0.5})
        return "refused"

    assert on_three(work) == ["refused"] * 3


def test_one_rank_has_nothing_to_average():
    assert averaged({}) == {}
