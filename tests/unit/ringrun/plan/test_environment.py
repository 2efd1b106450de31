from __future__ import annotations

from typing import Dict, List

import pytest

from ringcomm.config import Settings
from ringcomm.errors import ConfigError
from ringrun.plan import horovod
from ringrun.plan.environment import (
    MEMBERSHIP,
    forwarded,
    horovods_variables,
    not_forwarded,
    own_variables,
    rank_variables,
    removed,
)
from ringrun.plan.hosts import parse_hosts
from ringrun.plan.ranks import make_plan

HERE = {
    "A": "1",
    "NCCL_X": "x",
    "NCCL_Y": "y",
    "RINGCOMM_KEY": "secret",
    "RINGCOMM_TRACE": "t",
    "RINGCOMM_TIMEOUT": "9",
}


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        (["A"], {"A": "1"}),
        (["A=2", "B="], {"A": "2", "B": ""}),
        (["NCCL_*"], {"NCCL_X": "x", "NCCL_Y": "y"}),
        (["A=x=y"], {"A": "x=y"}),
        (["RINGCOMM_*"], {"RINGCOMM_TRACE": "t", "RINGCOMM_TIMEOUT": "9"}),
    ],
)
def test_forwarded(requests: List[str], found: Dict[str, str]) -> None:
    assert forwarded(requests, HERE) == found


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        ("1A=2", "'1A'"),
        ("a b", "neither"),
        ("RINGCOMM_KEY", "sets it for every rank"),
        ("RINGCOMM_KEY=1", "sets it for every rank"),
    ],
)
def test_bad_requests(request_: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forwarded([request_], HERE)
    assert word in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_is_not_set_is_reported_and_left_out() -> None:
    assert forwarded(["C", "NOTHING_*", "A"], HERE) == {"A": "1"}
    found = not_forwarded(["C", "NOTHING_*", "A", "NCCL_*", "C=", "X=1"], HERE)
    assert len(found) == 2 and found[0].startswith("-x C: no such variable is set here")
    assert "-x C=VALUE" in found[0] and found[1] == "-x 'NOTHING_*': no variable that is set here matches."


def test_own_variables() -> None:
    assert own_variables(Settings(timeout_s=9.0, verbose=True), HERE) == {
        "RINGCOMM_TRACE": "t",
        "RINGCOMM_TIMEOUT": "9.0",
        "RINGCOMM_VERBOSE": "1",
    }


def test_ranks_lose_what_belongs_to_another_job() -> None:
    assert set(MEMBERSHIP) < set(removed())
    assert {"RINGCOMM_KEY", "RINGCOMM_KEY_FD", "RINGCOMM_SLOT", "RINGCOMM_TIMEOUT"} < set(removed())
    assert {"HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_HOSTNAME"} < set(removed())


def test_variables_of_other_launchers() -> None:
    plan = make_plan(None, parse_hosts("a:2,b,c:2"))
    found = [rank_variables(place, plan.size, "abc"[place.host_index], True) for place in plan.places]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"]
    assert [" ".join(item[name] for name in names) for item in found] == [
        "0 5 0 2 0 0", "1 5 1 2 0 0", "2 5 0 1 1 1", "3 5 0 2 2 2", "4 5 1 2 2 2",
    ]  # fmt: skip
    names = [
        f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    ]
    names.append("HOROVOD_HOSTNAME")
    assert [" ".join(item[name] for name in names) for item in found] == [
        "0 5 0 2 0 3 a", "1 5 1 2 0 2 a", "2 5 0 1 1 3 b", "3 5 0 2 2 3 c", "4 5 1 2 1 2 c",
    ]  # fmt: skip
    assert set(horovod.IDENTITY) < set(found[0])
    plain = rank_variables(plan.places[1], plan.size, "a")
    names = ["GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK", "WORLD_SIZE"]
    assert sorted(plain) == names
    assert plain["NODE_RANK"] == plain["GROUP_RANK"] == str(plan.places[1].host_index)


def test_the_users_own_variables_of_horovods() -> None:
    environ = {"HOROVOD_TEST_GPU": "1", "HOROVOD_RANK": "3", "HOROVOD_SECRET_KEY": "s", "OTHER": "1"}
    assert horovods_variables(environ) == {"HOROVOD_TEST_GPU": "1"}
