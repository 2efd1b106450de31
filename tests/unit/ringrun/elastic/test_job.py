from __future__ import annotations

from typing import Any

import pytest

from ringrun.elastic.job import ElasticJob
from ringrun.job.launch import prepare
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options
from ringrun.plan.ranks import Place

HERE, FAR = HostSpec("localhost", slots=2), HostSpec("far")


def elastic_job(**options: Any) -> ElasticJob:
    job = prepare(Options(np=2, hosts="localhost:2,far", min_np=1, max_np=4, **options), ["train.py"], {})
    assert isinstance(job, ElasticJob)
    return job


def test_processes_are_numbered_as_members() -> None:
    job = elastic_job()
    job.open_host(0, HERE, 2, True)
    assert job.add_member(0, 0, 0, 0, 2) == {
        "rank": 0,
        "env": {"RINGCOMM_SLOT": "0:0", "RINGCOMM_ELASTIC": "1", "RINGCOMM_MEMBER": "0"},
    }
    job.open_host(1, FAR, 1, False)
    assert job.add_member(1, 1, 0, 1, 2)["env"]["RINGCOMM_SLOT"] == "1:0"
    assert job.plan.places == [Place(0, 0, 0, 2, 0, 1), Place(1, 1, 0, 1, 1, 2)]
    assert job.host_of(1).name == "far"
    with pytest.raises(AssertionError):
        job.add_member(3, 0, 1, 1, 2)


def test_horovods_variables_have_the_rank_that_a_process_will_probably_have() -> None:
    job = elastic_job(horovod=True, forward=("HOROVOD_CONTROLLER=own",))
    job.open_host(0, HERE, 2, True)
    job.add_member(0, 0, 0, 0, 2)
    env = job.add_member(1, 0, 1, 7, 8)["env"]
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_LOCAL_RANK"]) == ("7", "8", "1")
    assert (env["HOROVOD_ELASTIC"], env["HOROVOD_HOSTNAME"]) == ("1", "localhost")
    assert "HOROVOD_CONTROLLER" not in env, "variables of -x keep their values"


def test_an_agent_starts_no_process_by_itself() -> None:
    job = elastic_job()
    job.open_host(0, HERE, 2, True)
    job.open_host(1, FAR, 1, False)
    configs = [job.agent_config(host) for host in job.hosts]
    assert [(config["elastic"], config["slots"], config["ranks"]) for config in configs] == [
        (True, 2, []),
        (True, 1, []),
    ]
    assert configs[0]["env"]["RINGCOMM_SIZE"] == "2"
