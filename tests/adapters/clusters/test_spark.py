"""ringcomm.spark on a real Spark in local mode."""

from __future__ import annotations

import inspect
import os
import shutil
from typing import Any, Dict

import pytest

from tests.adapters.clusters.programs_run import ROOT, check_ranks, facts_of, run_program

pytest.importorskip("pyspark")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """What all jobs on Spark have given."""
    need_java()
    return facts_of("spark_job.py", tmp_path_factory.mktemp("spark"))


def need_java() -> None:
    """Skip, or in CI fail, without a Java."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        assert "RINGCOMM_REQUIRE_HOSTS" not in os.environ, "Spark needs a Java, and there is none"
        pytest.skip("Spark needs a Java (Debian: apt install default-jre-headless)")


def test_a_second_identical_call_runs_again(facts: Dict[str, Any]) -> None:
    check_ranks(facts["first"], 2, 1.0)
    check_ranks(facts["second"], 2, 1.0)


def test_variables_are_set_and_the_key_is_in_no_environment(facts: Dict[str, Any]) -> None:
    assert facts["environment"] == [["blue", []]] * 4


def test_two_jobs_at_once(facts: Dict[str, Any]) -> None:
    check_ranks(facts["two_jobs"][0], 2, 1.0)
    check_ranks(facts["two_jobs"][1], 2, 10.0)


def test_the_error_of_the_first_rank_that_failed_is_raised(facts: Dict[str, Any]) -> None:
    failed = facts["failed"]
    assert (failed["type"], failed["rank"], failed["cause"]) == ("RemoteError", 1, "KeyError")
    assert "no such sample" in failed["text"] and "functions.py" in failed["text"]


def test_a_lost_task_is_named_and_spark_goes_on(facts: Dict[str, Any]) -> None:
    died = facts["died"]
    assert (died["type"], died["rank"], died["cause"]) == ("RemoteError", 1, "PeerLostError")
    assert "was lost while others were in allreduce" in died["text"]
    check_ranks(facts["after"], 2, 1.0)


def test_what_cannot_be_started_is_refused(facts: Dict[str, Any]) -> None:
    assert facts["no_room"]["type"] == "StartTimeoutError" and "9 tasks at once" in facts["no_room"]["text"]
    assert "no active SparkContext" in facts["no_context"]["text"]
    assert facts["stdout"]["type"] == "NotOfferedError"


def test_the_signature_is_horovods() -> None:
    from ringcomm.spark import run

    assert " ".join(inspect.signature(run).parameters) == (
        "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose "
        "nics prefix_output_with_timestamp executable"
    )


def test_the_example_trains(tmp_path) -> None:
    need_java()
    output = run_program([str(ROOT / "examples" / "spark_digits.py")], tmp_path)
    assert "2 ranks, the same weights on all; accuracy 0.9" in output
