"""DDP, FSDP, ZeRO, DTensor, checkpoints over the backend; see ``checks_training.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.full


@pytest.mark.parametrize("size", [2, 3])
def test_training_gives_the_same_numbers_as_over_gloo(harness, size):
    outcome = harness.run_checks("checks_training.py", size)
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert sorted(outcome) == sorted(harness.names_of("checks_training.py"))


def test_training_on_a_device(harness):
    """The same on tensors that are taken for those of a device; sparse ones it does not support."""
    outcome = harness.run_checks("checks_training.py", 2, without="sparse", device="fake")
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    expected = {name for name in harness.names_of("checks_training.py") if "sparse" not in name}
    assert set(outcome) == expected
