from __future__ import annotations

from pathlib import Path
from typing import Dict, List

import pytest

from ringcomm.config import Settings
from ringcomm.errors import ConfigError
from ringrun.plan import horovod
from ringrun.plan.environment import (
    MEMBERSHIP,
    NOT_FORWARDED,
    forwarded,
    not_forwarded,
    of_the_shell,
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
    "RINGCOMM_LATE_AFTER": "9",
}


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        (["A"], {"A": "1"}),
        (["A=2", "B="], {"A": "2", "B": ""}),
        (["NCCL_*"], {"NCCL_X": "x", "NCCL_Y": "y"}),
        (["A=x=y"], {"A": "x=y"}),
        (["RINGCOMM_*"], {"RINGCOMM_TRACE": "t", "RINGCOMM_LATE_AFTER": "9"}),
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
        ("A=\0secret", "NUL"),
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
    assert [text.partition(":")[0] for text in found] == ["-x C", "-x NOTHING_*"]
    assert all("no variable of this name is set here" in text for text in found)


def test_own_variables() -> None:
    assert own_variables(Settings(late_after_s=9.0, verbose=True), HERE) == {
        "RINGCOMM_TRACE": "t",
        "RINGCOMM_LATE_AFTER": "9.0",
        "RINGCOMM_VERBOSE": "1",
    }


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


USERS = "STEPS WANDB_API_KEY AWS_SECRET_ACCESS_KEY HF_HOME OMP_NUM_THREADS NCCL_DEBUG HOROVOD_TEST_GPU TERMS"
MACHINES = (
    "PATH HOME USER SHELL PWD TMPDIR LANG LC_ALL SSH_AUTH_SOCK XDG_CACHE_HOME DISPLAY DBUS_SESSION_BUS "
    "LD_PRELOAD LD_LIBRARY_PATH PYTHONPATH PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX HOSTNAME TERM BASH_ENV "
    "BASH_FUNC_ml%% ENV IFS GIT_SSH_COMMAND OMP_TOOL_LIBRARIES CUDA_VISIBLE_DEVICES SLURM_JOB_ID "
    "SLURMD_NODENAME RANK MASTER_PORT RINGCOMM_KEY RINGCOMM_LATE_AFTER HOROVOD_RANK HOROVOD_CONTROLLER "
    "_HOROVOD_SECRET_KEY"
)


def test_other_hosts_get_the_shells_variables_but_those_of_a_machine_or_a_login() -> None:
    environ = dict.fromkeys(f"{USERS} {MACHINES}".split(), "\n'\udcff")
    assert " ".join(of_the_shell(environ)) == USERS
    assert set(of_the_shell(environ).values()) == {"\n'\udcff"}
    assert set(of_the_shell(dict.fromkeys([*removed(), *MEMBERSHIP], "1"))) == set()


def test_the_page_lists_what_is_not_forwarded() -> None:
    page = (Path(__file__).parents[4] / "docs" / "ringrun.md").read_text()
    rows = "\n".join(f"| {what} | `{names.replace(' ', '`, `')}` |" for what, names in NOT_FORWARDED)
    assert rows in page, rows
