"""ringcomm.dask on a real cluster of four worker processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest

import ringcomm as rc
from ringcomm._adapter.placed import Ticket
from ringcomm.errors import ConfigError
from ringcomm.storage.results import unpack
from tests.adapters.clusters.programs_run import check_failure, check_ranks, facts_of, run_program

pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what all jobs on the cluster have given."""
    return facts_of("dask_job.py", tmp_path_factory.mktemp("dask"))


def test_a_second_identical_call_runs_again(facts: Dict[str, Any]) -> None:
    check_ranks(facts["first"], 4, 1.0)
    check_ranks(facts["second"], 4, 1.0)
    assert facts["local_rank"] == [[rank, rank] for rank in range(4)]


def test_arguments_may_be_futures_and_may_be_called_like_options_of_dask(facts: Dict[str, Any]) -> None:
    assert facts["arguments"] == [7.0] * 4


def test_process_groups_of_pytorch_need_no_address_and_are_ended(facts: Dict[str, Any]) -> None:
    failed, *trained = facts["torch"]
    assert (failed["type"], failed["rank"], failed["cause"]) == ("RemoteError", 1, "KeyError")
    assert trained == [[[rank, 2, [200.0] * 3] for rank in range(2)]] * 2


def test_the_key_is_in_no_environment(facts: Dict[str, Any]) -> None:
    assert [keys for _, keys in facts["environment"]] == [[]] * 4


def test_two_jobs_at_once_on_different_workers(facts: Dict[str, Any]) -> None:
    check_ranks(facts["two_jobs"][0], 2, 1.0)
    check_ranks(facts["two_jobs"][1], 2, 10.0)


def test_the_error_of_the_first_rank_that_failed_is_raised(facts: Dict[str, Any]) -> None:
    check_failure(facts["failed"])


def test_a_lost_worker_is_named_although_its_task_never_ends(facts: Dict[str, Any]) -> None:
    died = facts["died"]
    assert (died["type"], died["rank"], died["host"]) == ("RemoteError", 1, "127.0.0.1")
    assert died["cause"] == "PeerLostError"
    assert "rank 1 (127.0.0.1) was lost while others were in allreduce" in died["text"]
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
    output = run_program([str(Path(__file__).with_name("dask_digits.py"))], tmp_path)
    assert output.startswith("2 ranks, the same weights on all; accuracy 0.9")


ALONE = Ticket("job", 0, 1, 0, {"RINGCOMM_SIZE": "1"})


def ranks_of(factor: float, local_rank: int = -1) -> List[float]:
    rc.init()
    return [factor * rc.size(), local_rank]


def test_the_task_of_a_rank() -> None:
    from ringcomm.dask import _attempt

    assert unpack(_attempt(ALONE, ranks_of, False, [2.0], {}))["value"] == [2.0, -1]
    assert unpack(_attempt(ALONE, ranks_of, True, [], {"factor": 3.0}))["value"] == [3.0, 0]
    failed = unpack(_attempt(ALONE, ranks_of, False, [], {}))
    assert not failed["ok"] and "factor" in failed["summary"] and not rc.is_initialized()


def test_clients_that_cannot_be_used_are_refused() -> None:
    import ringcomm.dask

    with pytest.raises(ConfigError, match="asynchronous client"):
        ringcomm.dask.run(SimpleNamespace(asynchronous=True), print)
    empty = SimpleNamespace(asynchronous=False, run_on_scheduler=lambda function: function(empty), workers={})
    with pytest.raises(ConfigError, match="There is no worker"):
        ringcomm.dask.submit(empty, print)


def test_a_job_of_which_a_task_cannot_be_submitted_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import ringcomm.dask

    closed = []
    monkeypatch.setattr(ringcomm.dask.PlacedJob, "close", lambda job: closed.append(job.size))

    def submit(*arguments: Any, workers: List[str], **options: Any) -> None:
        assert (workers, options["pure"], options["retries"]) == (["tcp://10.0.0.1:1"], False, 0)
        raise OSError("the scheduler has gone")

    client = SimpleNamespace(
        asynchronous=False, run_on_scheduler=lambda _: ["tcp://10.0.0.1:1"], submit=submit
    )
    with pytest.raises(OSError, match="the scheduler has gone"):
        ringcomm.dask.run(client, print)
    assert closed == [1]


def test_what_dask_reports_of_a_task_is_the_outcome_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import ringcomm.dask

    monkeypatch.setattr(
        ringcomm.dask.distributed, "wait", lambda given, **options: SimpleNamespace(done=given)
    )
    left = {_Future("error", OSError("the worker was killed")): 0, _Future("cancelled", None): 1}
    (_, first), (_, second) = ringcomm.dask._poll(left, 0.0)
    assert first.lost and first.describe() == "OSError: the worker was killed"
    assert second.describe() == "RuntimeError: the task was cancelled" and left == {}


class _Future:
    """A future of Dask whose task has not returned."""

    def __init__(self, status: str, problem: Any) -> None:
        self.status = status
        self.exception = lambda: problem
