"""DDP, FSDP, ZeRO, DTensor, checkpoints over the backend; see ``checks_training.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.full


@pytest.mark.parametrize("size", [2, 3])
def test_training_gives_the_same_numbers_as_over_gloo(harness, size):
    harness.check("checks_training.py", size)


def test_training_on_a_device(harness):
    """The same on tensors that are taken for those of a device.

    It supports neither sparse tensors nor storages that change their size.
    """
    harness.check("checks_training.py", 2, without="sparse first_kind", device="fake")
