"""A script with the calls of Horovod's elastic example for PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.elastic_scripts import run_script


@pytest.mark.release
def test_a_script_written_for_horovod_survives_the_loss_of_a_host(tmp_path: Path) -> None:
    found = run_script("horovod_torch_elastic.py", tmp_path)
    assert [line["epoch"] for line in found] == list(range(1, len(found) + 1)), "every epoch is finished once"
    assert found[0]["host"] == "localhost" and found[-1]["host"] == "127.0.0.1"
