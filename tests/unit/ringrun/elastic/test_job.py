"""Elastic jobs as data: from options to limits, and the hosts and processes that are added."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm.errors import ConfigError
from ringrun.elastic.job import (
    MAX_HOSTS,
    ElasticJob,
    HostLimits,
    failed_text,
    fixed_hosts,
    host_key,
    limits_of,
    parse_discovered,
    timeout_text,
)
from ringrun.job.launch import prepare
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options

HERE = HostSpec("localhost", slots=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(np=3, max_np=2), "--max-np 2 is less than --min-np 3"),
        (Options(np=3, min_np=4), "-np 3 is less than --min-np 4"),
        (Options(np=3, min_np=1, max_np=2), "-np 3 is more than --max-np 2"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(options: Options, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        limits_of(options)


@pytest.mark.parametrize("horovod, name", [(True, "Horovod"), (False, "ringrun")])
def test_texts_that_programs_search_for(horovod: bool, name: str) -> None:
    limits = HostLimits(3, 2, timeout_s=12.5, horovod=horovod)
    failed = failed_text(limits, "jetson1", 1, 7)
    assert failed.startswith(f"{name} detected that one or more processes exited with non-zero status")
    assert failed.endswith("Process name: jetson1[1]\nExit code: 7")
    late = timeout_text(limits, 2)
    assert f"at least 2 {name} processes" in late and late.endswith("Timeout after 12.5 seconds.")


@pytest.mark.parametrize(
    ("options", "slots"),
    [(Options(np=3, min_np=1), 3), (Options(min_np=1, max_np=4), 4), (Options(min_np=2), 2)],
)
def test_without_a_list_the_host_is_this_machine(options: Options, slots: int) -> None:
    assert fixed_hosts(options, []) == [HostSpec("localhost", slots=slots)]


def elastic_job(**options: Any) -> ElasticJob:
    job = prepare(Options(np=2, hosts="localhost:2,far", min_np=1, max_np=4, **options), ["train.py"], {})
    assert isinstance(job, ElasticJob)
    return job


def test_horovods_variables_have_the_rank_that_a_process_will_probably_have() -> None:
    job = elastic_job(horovod=True, forward=("HOROVOD_CONTROLLER=own",))
    job.open_host(0, HERE, 2, True)
    job.add_member(0, 0, 0, 0, 2)
    env = job.add_member(1, 0, 1, 7, 8)["env"]
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_LOCAL_RANK"]) == ("7", "8", "1")
    assert (env["HOROVOD_ELASTIC"], env["HOROVOD_HOSTNAME"]) == ("1", "localhost")
    assert "HOROVOD_CONTROLLER" not in env, "variables of -x keep their values"


# ---- the output of the script -----------------------------------------------------------------------


def test_the_order_is_that_of_the_lines() -> None:
    found = parse_discovered("b:2\n\n a \nme@c:3\n[::1]:4\nb:2\n", slots=5)
    assert found == [
        HostSpec("b", slots=2), HostSpec("a", slots=5), HostSpec("c", "me", 3), HostSpec("::1", slots=4),
    ]  # fmt: skip
    assert [host_key(spec) for spec in found] == ["b", "a", "me@c", "::1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb:0", ["line 2", "'0'"]),
        ("a b", ["line 1", "'a b'"]),
        ("a:1\nA:2", ["line 2", "2 slots", "1 in an earlier line"]),
        ("-oProxyCommand=x", ["line 1"]),
        ("$(reboot)", ["line 1"]),
        ("\n".join(f"h{number}" for number in range(MAX_HOSTS + 1)), [f"line {MAX_HOSTS + 1}", "1024"]),
    ],
)
def test_invalid_output_is_refused_with_its_line(text: str, words: list) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_discovered(text)
    assert [word for word in words if word not in str(problem.value)] == []
