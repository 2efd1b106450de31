"""ringcomm.ray on a real Ray on this machine: RayExecutor, and the configurations for Ray Train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from ringcomm.config import Settings
from ringcomm.configuration import membership as environment
from ringcomm.errors import ConfigError, NotOfferedError
from ringcomm.storage.keys import read_key
from tests.adapters.clusters.programs_run import check_jobs, facts_of, run_program
from tests.adapters.signatures import differences

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what all jobs of RayExecutor have given."""
    return facts_of("ray_job.py", tmp_path_factory.mktemp("ray"))


def test_jobs_in_the_same_processes(facts: Dict[str, Any]) -> None:
    check_jobs(facts, 3)
    assert facts["second"] == facts["first"] == facts["after_failure"]
    assert [colour for colour, _ in facts["environment"]] == ["blue"] * 3


def test_after_the_loss_of_a_worker_and_before_the_start(facts: Dict[str, Any]) -> None:
    assert facts["without_worker"]["rank"] == 1 and "has ended" in facts["without_worker"]["text"]
    assert "call start() first" in facts["not_started"]["text"]


def test_objects_stay_on_their_workers(facts: Dict[str, Any]) -> None:
    assert facts["counted"] == [[15, 16], [20, 21]]
    assert facts["counted_once"] == 25
    assert (facts["unfit"]["rank"], facts["unfit"]["cause"]) == (1, "ValueError")


def test_what_cannot_be_started_is_refused(facts: Dict[str, Any]) -> None:
    assert facts["no_room"]["type"] == "StartTimeoutError" and "free now" in facts["no_room"]["text"]
    assert facts["twice"]["type"] == "ConfigError" and facts["callbacks"]["type"] == "NotOfferedError"


def test_the_workers_of_a_host_see_all_of_its_gpus(facts: Dict[str, Any]) -> None:
    """So the local rank is a GPU's number. Ray only counts them; there need be none."""
    assert [sorted(seen.split(",")) for seen, _ in facts["gpus"]] == [["0", "1"]] * 2


LIKE_HOROVODS = """
RayExecutor(settings, num_workers=None, num_hosts=None, num_workers_per_host=1, cpus_per_worker=1, use_gpu=False, gpus_per_worker=None, use_current_placement_group=True, min_workers=None, max_workers=None, reset_limit=None, cooldown_range=None, elastic_timeout=600, override_discovery=True)
RayExecutor.create_settings(timeout_s=30, ssh_identity_file=None, ssh_str=None, placement_group_timeout_s=100, nics=None)
RayExecutor.start(executable_cls=None, executable_args=None, executable_kwargs=None, extra_env_vars=None)
RayExecutor.run(fn, args=None, kwargs=None, callbacks=None)
RayExecutor.run_remote(fn, args=None, kwargs=None)
RayExecutor.execute(fn, callbacks=None)
RayExecutor.execute_single(fn)
"""  # noqa: E501


def test_signatures_are_horovods() -> None:
    import ringcomm.ray

    assert differences(ringcomm.ray, LIKE_HOROVODS) == []


def test_arguments_that_do_not_fit() -> None:
    from ringcomm.ray import RayExecutor, job_settings

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
    output = run_program([str(Path(__file__).with_name("digits.py")), "ray"], tmp_path)
    assert "2 ranks, the same weights on all; accuracy 0.9" in output


# ---- Ray Train -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """Return what Ray Train has given."""
    pytest.importorskip("ray.train.torch")
    return facts_of("ray_train_job.py", tmp_path_factory.mktemp("ray_train"))


@pytest.mark.release
def test_the_ranks_start_again_after_a_loss(trained: Dict[str, Any]) -> None:
    assert trained["error"].startswith("1: rank 1 (") and "was lost while others were in" in trained["error"]
    assert trained["numpy"][:4] == [0, 2, 0, 2] and trained["numpy"][5] == [3.0] * 3


@pytest.mark.release
def test_a_trainer_of_pytorch_uses_the_backend(trained: Dict[str, Any]) -> None:
    backend, first, last, weights = trained["torch"]
    assert backend == "ringcomm"
    assert last < first / 10
    assert weights[0] == weights[1]


class ThisProcess:
    """Replaces Ray Train's group of workers."""

    def execute(self, function: Callable[..., Any], *arguments: Any) -> List[Any]:
        return [function(*arguments)]


@pytest.mark.parametrize("encrypt", [False, True])
def test_every_start_of_a_process_group_has_a_key_of_its_own(
    encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train.torch")
    from ringcomm.ray import TorchConfig

    config = TorchConfig(settings=Settings(encrypt=True) if encrypt else None)
    backend = config.backend_cls()
    started: List[Any] = []
    monkeypatch.setattr(
        type(backend).__mro__[1], "on_start", lambda self, group, config: started.append(config.backend)
    )
    monkeypatch.setattr(type(backend).__mro__[1], "on_shutdown", lambda self, group, config: None)
    keys = []
    for _ in range(2):
        backend.on_start(ThisProcess(), config)
        keys.append(read_key(None, "", environment.variables(None)["RINGCOMM_KEY"]))
    assert "RINGCOMM_KEY" not in os.environ
    backend.on_shutdown(ThisProcess(), config)
    assert "RINGCOMM_KEY" not in environment.variables(None), "Ray uses the worker again"
    assert started == ["ringcomm"] * 2 and keys[0][0] != keys[1][0]
    assert [("BEGIN CERTIFICATE" in certificate) for _, certificate in keys] == [encrypt] * 2
