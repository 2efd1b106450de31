"""ringcomm.ray on a real Ray on this machine."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.config import Settings
from ringcomm.errors import ConfigError, NotOfferedError
from tests.adapters.clusters.programs_run import (
    PROGRAMS,
    check_failure,
    check_ranks,
    facts_of,
    run_program,
)
from tests.support.another_user import LOOKS, OTHER_USER, become

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what all jobs of RayExecutor have given."""
    return facts_of("ray_job.py", tmp_path_factory.mktemp("ray"))


def test_functions_run_again_in_the_same_processes(facts: Dict[str, Any]) -> None:
    check_ranks(facts["first"], 3, 1.0)
    assert facts["second"] == facts["first"]
    assert facts["environment"] == [["blue", []]] * 3


def test_the_error_of_the_first_rank_that_failed_is_raised(facts: Dict[str, Any]) -> None:
    check_failure(facts["failed"])
    assert facts["after_failure"] == facts["first"]


def test_a_lost_worker_is_named_by_the_other_ranks(facts: Dict[str, Any]) -> None:
    died = facts["died"]
    assert (died["type"], died["rank"], died["cause"]) == ("RemoteError", 1, "PeerLostError")
    assert "was lost" in died["text"]
    assert facts["without_worker"]["rank"] == 1 and "has ended" in facts["without_worker"]["text"]
    assert "call start() first" in facts["not_started"]["text"]


def test_objects_stay_on_their_workers(facts: Dict[str, Any]) -> None:
    assert facts["counted"] == [[15, 16], [20, 21]]
    assert facts["counted_once"] == 25
    assert (facts["unfit"]["rank"], facts["unfit"]["cause"]) == (1, "ValueError")


def test_two_jobs_at_once(facts: Dict[str, Any]) -> None:
    check_ranks(facts["two_jobs"][0], 2, 1.0)
    check_ranks(facts["two_jobs"][1], 2, 10.0)


def test_what_cannot_be_started_is_refused(facts: Dict[str, Any]) -> None:
    assert facts["no_room"]["type"] == "StartTimeoutError" and "free now" in facts["no_room"]["text"]
    assert facts["twice"]["type"] == "ConfigError" and facts["callbacks"]["type"] == "NotOfferedError"


def test_the_workers_of_a_host_see_all_of_its_gpus(facts: Dict[str, Any]) -> None:
    """So the local rank is a GPU's number. Ray only counts them; there need be none."""
    assert [sorted(seen.split(",")) for seen, _ in facts["gpus"]] == [["0", "1"]] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_finds_no_key(tmp_path: Path) -> None:
    """Not in processes, nor in files of Ray's session, nor in its shared memory."""
    result = tmp_path / "facts.json"
    program = become(OTHER_USER) + LOOKS
    run_program([str(PROGRAMS / "ray_seen_job.py"), str(result), program], tmp_path)
    facts = json.loads(result.read_text())
    assert facts["keys"] >= 1 and facts["looked"] and facts["found"] == [], facts
    assert facts["again"] == facts["first"]
    check_ranks(facts["first"], 2, 1.0)


def test_signatures_are_horovods() -> None:
    from ringcomm.ray import RayExecutor

    def names(function: Any) -> str:
        return " ".join(name for name in inspect.signature(function).parameters if name != "self")

    assert names(RayExecutor) == (
        "settings num_workers num_hosts num_workers_per_host cpus_per_worker use_gpu gpus_per_worker "
        "use_current_placement_group min_workers max_workers reset_limit cooldown_range elastic_timeout "
        "override_discovery"
    )
    assert names(RayExecutor.create_settings) == (
        "timeout_s ssh_identity_file ssh_str placement_group_timeout_s nics"
    )
    assert names(RayExecutor.start) == "executable_cls executable_args executable_kwargs extra_env_vars"
    assert names(RayExecutor.run) == "fn args kwargs callbacks"
    assert names(RayExecutor.run_remote) == "fn args kwargs"
    assert names(RayExecutor.execute) == "fn callbacks"
    assert names(RayExecutor.execute_single) == "fn"


def test_arguments_that_do_not_fit() -> None:
    from ringcomm.ray import RayExecutor
    from ringcomm.ray.executor import job_settings

    for numbers in ({}, {"num_workers": 1, "num_hosts": 1}, {"num_workers": 0},
                    {"num_workers": 1, "gpus_per_worker": 1},
                    {"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}):  # fmt: skip
        with pytest.raises(ConfigError):
            RayExecutor(None, **numbers)
    for elastic in ("min_workers", "max_workers", "reset_limit", "cooldown_range"):
        with pytest.raises(NotOfferedError, match=f"{elastic}: elastic jobs on Ray are not offered"):
            RayExecutor(None, num_workers=1, **{elastic: 1})
    own = Settings(start_timeout_s=3.0)
    assert job_settings(own) is own and job_settings(None) == Settings.from_environment()
    given = job_settings(RayExecutor.create_settings(timeout_s=9, nics=["eth0", "eth1"]))
    assert (given.start_timeout_s, given.iface) == (9.0, "eth0,eth1")


@pytest.mark.release
def test_a_program_trains(tmp_path) -> None:
    output = run_program([str(Path(__file__).with_name("ray_digits.py"))], tmp_path)
    assert "2 ranks, the same weights on all; accuracy 0.9" in output
