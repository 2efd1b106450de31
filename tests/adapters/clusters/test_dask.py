"""ringcomm.dask on a real cluster of four worker processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict

import pytest

from ringcomm.errors import ConfigError
from tests.adapters.clusters.programs_run import check_jobs, check_ranks, facts_of, run_program

pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what all jobs on the cluster have given."""
    return facts_of("dask_job.py", tmp_path_factory.mktemp("dask"))


def test_jobs(facts: Dict[str, Any]) -> None:
    check_jobs(facts, 4)
    assert facts["local_rank"] == [[rank, rank] for rank in range(4)]


def test_arguments_may_be_futures_and_may_be_called_like_options_of_dask(facts: Dict[str, Any]) -> None:
    assert facts["arguments"] == [7.0] * 4


def test_process_groups_of_pytorch_need_no_address_and_are_ended(facts: Dict[str, Any]) -> None:
    failed, *trained = facts["torch"]
    assert (failed["type"], failed["rank"], failed["cause"]) == ("RemoteError", 1, "KeyError")
    assert trained == [[[rank, 2, [200.0] * 3] for rank in range(2)]] * 2


def test_a_lost_worker_is_named_although_its_task_never_ends(facts: Dict[str, Any]) -> None:
    died = facts["died"]
    assert died["host"] == "127.0.0.1" and "rank 1 (127.0.0.1) was lost while others were" in died["text"]
    other, own = facts["submitted"]["other"], facts["submitted"]["own"]
    assert (other["type"], other["rank"]) == ("PeerLostError", 1)
    assert "Cancelled" in own["type"]
    check_ranks(facts["after"], 4, 1.0)


def test_workers_that_cannot_be_ranks_are_refused(facts: Dict[str, Any]) -> None:
    assert "named twice" in facts["twice"]["text"]
    assert "has no worker 'tcp://127.0.0.1:1'" in facts["unknown"]["text"]
    assert facts["threads"]["cause"] == "ConfigError"
    assert "processes of their own" in facts["threads"]["text"]


@pytest.mark.release
def test_a_program_trains(tmp_path) -> None:
    output = run_program([str(Path(__file__).with_name("digits.py")), "dask"], tmp_path)
    assert output.startswith("2 ranks, the same weights on all; accuracy 0.9")


def test_clients_that_cannot_be_used_are_refused() -> None:
    import ringcomm.dask

    with pytest.raises(ConfigError, match="asynchronous client"):
        ringcomm.dask.run(SimpleNamespace(asynchronous=True), print)
    empty = SimpleNamespace(asynchronous=False, run_on_scheduler=lambda function: function(empty), workers={})
    with pytest.raises(ConfigError, match="There is no worker"):
        ringcomm.dask.submit(empty, print)
