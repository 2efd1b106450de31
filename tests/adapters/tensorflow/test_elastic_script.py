"""A script with the calls of Horovod's elastic example for TensorFlow 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.elastic_scripts import run_script


@pytest.mark.release
def test_a_script_written_for_horovod_survives_the_loss_of_a_host(tmp_path: Path) -> None:
    found = run_script("horovod_tensorflow2_elastic.py", tmp_path)
    batches = [line["batch"] for line in found]
    assert sorted(set(batches)) == list(range(0, batches[-1] + 1, 10))
    assert found[0]["host"] == "localhost" and found[-1]["host"] == "127.0.0.1"
