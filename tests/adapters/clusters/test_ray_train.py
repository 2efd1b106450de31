"""Ray Train with the configurations of ringcomm.ray, on a real Ray on this machine."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from tests.adapters.clusters.programs_run import facts_of

pytest.importorskip("ray.train.torch")

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what Ray Train has given."""
    return facts_of("ray_train_job.py", tmp_path_factory.mktemp("ray_train"))


def test_the_ranks_start_again_after_a_loss(trained: Dict[str, Any]) -> None:
    assert trained["error"].startswith("1: rank 1 (") and "was lost while others were in" in trained["error"]
    assert trained["numpy"][:4] == [0, 2, 0, 2] and trained["numpy"][5] == [3.0] * 3


def test_a_trainer_of_pytorch_uses_the_backend(trained: Dict[str, Any]) -> None:
    backend, first, last, weights = trained["torch"]
    assert backend == "ringcomm"
    assert last < first / 10
    assert weights[0] == weights[1]
