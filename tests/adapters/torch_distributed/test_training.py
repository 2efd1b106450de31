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
    """The same on tensors that are taken for those of a device.

    It supports neither sparse tensors nor storages that change their size.
    """
    left_out = "sparse first_kind"
    outcome = harness.run_checks("checks_training.py", 2, without=left_out, device="fake")
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    names = harness.names_of("checks_training.py")
    expected = {name for name in names if not any(part in name for part in left_out.split())}
    assert set(outcome) == expected
