"""Learning rates as functions of epoch and batch, and the refusal of Keras 2."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, List, Optional

import pytest

from ringcomm._adapter.callbacks import Schedule, warmup
from ringcomm.errors import ConfigError


def rates(schedule: Schedule, epochs: int, batches: int) -> List[Optional[float]]:
    return [schedule.rate(epoch, batch) for epoch in range(epochs) for batch in range(batches)]


def test_a_number_applies_from_one_epoch_on_and_before_another() -> None:
    schedule = Schedule(0.5, 0.1, start_epoch=1, end_epoch=2)
    assert rates(schedule, 3, 2) == [None, None, 0.05, None, None, None]


def test_a_staircase_has_a_step_per_epoch() -> None:
    schedule = Schedule(8.0, lambda epoch: 0.5**epoch)
    assert rates(schedule, 3, 2) == [8.0, None, 4.0, None, 2.0, None]


def test_without_a_staircase_the_function_gets_fractions() -> None:
    schedule = Schedule(1.0, lambda epoch: epoch, staircase=False, steps_per_epoch=4)
    assert rates(schedule, 2, 4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_fractions_need_the_number_of_batches() -> None:
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        Schedule(1.0, lambda epoch: epoch, staircase=False).rate(0, 0)


def test_the_initial_rate_is_needed() -> None:
    missing: Any = None
    with pytest.raises(ConfigError, match="initial_lr"):
        Schedule(missing, 1.0)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_warm_up_rises_from_that_of_one_rank_to_that_of_all(size: int) -> None:
    assert warmup(size, 5, 0) == pytest.approx(1 / size)
    assert warmup(size, 5, 5) == pytest.approx(1)
    assert warmup(size, 5, 2.5) == pytest.approx((1 / size + 1) / 2)
    assert warmup(size, 0, 3) == 1


PROGRAM = """
import sys, types
sys.modules["keras"] = keras = types.ModuleType("keras")
keras.__version__ = "2.15.0"
import ringcomm.keras
"""


def test_what_is_needed_in_place_of_keras_2_is_named() -> None:
    """TensorFlow 2.15 and older bring it."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "ImportError: ringcomm.keras and ringcomm.tensorflow.keras need Keras 3" in done.stderr
    assert "TensorFlow 2.16" in done.stderr and "this is Keras 2.15.0" in done.stderr
