"""Models divided among ranks: pipelines, tensor parallelism, FSDP2; see ``checks_larger_*.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.full

FILES = [
    "checks_larger_messages.py", "checks_larger_pipeline.py", "checks_larger_tensors.py",
    "checks_larger_sharded.py",
]  # fmt: skip


def check_all(harness, size):
    outcome = harness.run_checks(" ".join(FILES), size)
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert sorted(outcome) == sorted(name for file in FILES for name in harness.names_of(file))


@pytest.mark.parametrize("size", [3, 4])
def test_divided_models_have_the_numbers_of_one_process(harness, size):
    check_all(harness, size)
