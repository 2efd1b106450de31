"""The checks of ``checks_*.py`` on real processes: the same as by hand, in one process, or over Gloo."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.adapters.torch_distributed import harness

pytestmark = pytest.mark.xdist_group("torch_distributed")
"""One server of forks imports PyTorch for all of them."""
release = pytest.mark.release
COLLECTIVES = "checks_collectives.py checks_messages.py"


@pytest.mark.parametrize("size", [pytest.param(1, marks=release), 2, pytest.param(4, marks=release)])
def test_collectives_and_messages(size):
    harness.check(COLLECTIVES, size)


@pytest.mark.full
@pytest.mark.parametrize("size", [pytest.param(2, marks=release), 3, pytest.param(4, marks=release)])
def test_training_gives_the_same_numbers_as_over_gloo(size):
    harness.check("checks_training.py", size)


@release
@pytest.mark.parametrize(
    ("files", "size", "without"),
    [
        (COLLECTIVES, 2, "sparse wrap"),
        (COLLECTIVES, 3, "sparse wrap"),
        ("checks_training.py", 2, "sparse first_kind"),
    ],
)
def test_tensors_that_are_taken_for_those_of_a_device(files, size, without):
    """It supports neither sparse tensors nor storages that change their size."""
    harness.check(files, size, without=without, device="fake")


@release
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("files", ["checks_divided.py", "checks_sharded.py"])
def test_divided_models_have_the_numbers_of_one_process(files, size):
    harness.check(files, size)


@release
def test_compiled_programs_give_the_same_numbers_as_over_gloo():
    harness.check("checks_compiled.py", 2)


def test_ways_to_start():
    harness.check("checks_start.py", 2)


@pytest.mark.full
def test_every_rank_is_told_what_went_wrong():
    harness.check("checks_failures.py", 3, lost=2)
