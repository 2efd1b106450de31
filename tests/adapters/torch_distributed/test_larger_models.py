"""Models divided among ranks: pipelines, tensor parallelism, FSDP2; see ``checks_larger_*.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.release

FILES = " ".join(f"checks_larger_{part}.py" for part in ("messages", "pipeline", "tensors", "sharded"))


@pytest.mark.parametrize("size", [3, 4])
def test_divided_models_have_the_numbers_of_one_process(harness, size):
    harness.check(FILES, size)


@pytest.mark.parametrize(
    "name, lost",
    [
        ("check_the_first_stage_is_lost", 0),
        ("check_a_stage_of_one_of_two_pipelines_is_lost", 2),
        ("check_a_stage_that_serves_no_rendezvous_is_lost", 3),
    ],
)
def test_every_rank_names_the_lost_stage(harness, name, lost):
    outcome = harness.run_checks("checks_larger_lost.py", 4, only=name)
    ended = outcome.pop("end", "")
    assert outcome == {name: ""}, outcome
    assert ended.startswith(f"rank {lost} ended with -9"), ended
