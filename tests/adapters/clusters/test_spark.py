"""ringcomm.spark on a real Spark in local mode."""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict

import pytest

from ringcomm._adapter.placed import by_host
from ringcomm.errors import ConfigError, RemoteError
from tests.adapters.clusters.programs_run import check_jobs, check_ranks, facts_of, run_program

pytest.importorskip("pyspark")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what all jobs on Spark have given."""
    need_java()
    return facts_of("spark_job.py", tmp_path_factory.mktemp("spark"))


def need_java() -> None:
    """Skip, or in CI fail, without a Java."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        assert "RINGCOMM_REQUIRE_HOSTS" not in os.environ, "Spark needs a Java, and there is none"
        pytest.skip("Spark needs a Java (Debian: apt install default-jre-headless)")


def test_jobs(facts: Dict[str, Any]) -> None:
    check_jobs(facts, 2)
    check_ranks(facts["after"], 2, 1.0)
    assert [colour for colour, _ in facts["environment"]] == ["blue"] * 4


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


@pytest.mark.release
def test_a_program_trains(tmp_path) -> None:
    need_java()
    output = run_program([str(Path(__file__).with_name("digits.py")), "spark"], tmp_path)
    assert "2 ranks, the same weights on all; accuracy 0.9" in output


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context of Spark on which no job can be started, as the active one."""
    import pyspark

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("the cluster has gone\nsee its log")

    found = SimpleNamespace(defaultParallelism=1, setJobGroup=refuse, cancelJobGroup=lambda group: None)
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", found)
    return found


def test_when_spark_gives_up_that_is_the_error(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ringcomm.spark

    monkeypatch.setattr(ringcomm.spark, "ARRIVE_S", 0.0)
    with pytest.raises(RemoteError, match="Spark could not run the tasks. the cluster has gone$") as caught:
        ringcomm.spark.run(print, verbose=0, nics=["lo"])
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ConfigError, match="num_proc=0: at least one process"):
        ringcomm.spark.run(print, num_proc=0)


def test_tasks_of_a_host_have_successive_ranks() -> None:
    assert by_host(range(5), "babca".__getitem__) == [0, 2, 1, 4, 3]
