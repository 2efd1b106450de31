"""Variables of ranks, and settings from every source."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.configuration.settings import Settings, SettingValue, effective, tunables, values_in
from ringcomm.errors import ConfigError
from ringrun.plan.environment import (
    HOROVOD_IDENTITY,
    MEMBERSHIP,
    NOT_FORWARDED,
    forwarded,
    from_values,
    horovod_counted,
    horovod_settings,
    horovod_settings_of_program,
    horovod_without_effect,
    not_forwarded,
    of_the_shell,
    rank_variables,
    removed,
)
from ringrun.plan.hosts import parse_hosts
from ringrun.plan.ranks import make_plan

HERE = {
    "A": "1", "NCCL_X": "x", "NCCL_Y": "y", "RINGCOMM_KEY": "secret", "RINGCOMM_TRACE": "t",
    "RINGCOMM_LATE_AFTER": "9",
}


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        (["A"], {"A": "1"}), (["A=2", "B="], {"A": "2", "B": ""}),
        (["NCCL_*"], {"NCCL_X": "x", "NCCL_Y": "y"}), (["A=x=y"], {"A": "x=y"}),
        (["RINGCOMM_*"], {"RINGCOMM_TRACE": "t", "RINGCOMM_LATE_AFTER": "9"}),
    ],
)
def test_forwarded(requests: List[str], found: Dict[str, str]) -> None:
    assert forwarded(requests, HERE) == found


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        ("1A=2", "'1A'"), ("a b", "neither"), ("RINGCOMM_KEY", "sets it for every rank"),
        ("RINGCOMM_KEY=1", "sets it for every rank"), ("A=\0secret", "NUL"),
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


def test_variables_of_other_launchers() -> None:
    plan = make_plan(None, parse_hosts("a:2,b,c:2"))
    found = [rank_variables(place, plan.size, "abc"[place.host_index], True) for place in plan.places]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"]
    assert [" ".join(item[name] for name in names) for item in found] == [
        "0 5 0 2 0 0", "1 5 1 2 0 0", "2 5 0 1 1 1", "3 5 0 2 2 2", "4 5 1 2 2 2",
    ]  # fmt: skip
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
    names = [f"HOROVOD_{name}" for name in names]
    assert [" ".join(item[name] for name in names) for item in found] == [
        "0 5 0 2 0 3 a", "1 5 1 2 0 2 a", "2 5 0 1 1 3 b", "3 5 0 2 2 3 c", "4 5 1 2 1 2 c",
    ]  # fmt: skip
    assert set(HOROVOD_IDENTITY) < set(found[0])
    assert sorted(rank_variables(plan.places[1], plan.size, "a")) == sorted(
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"]
    )


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


GOOD: Dict[str, str] = {
    "iface": "eth0", "start_timeout_s": "7", "transport": "tcp", "fusion_bytes": "3M", "late_after_s": "12",
    "dead_after_s": "13", "timeline": "t.json", "diagnose_dir": "flights", "verbose": "1", "encrypt": "1",
    "threads": "3", "compression": "int8", "advise": "1", "local_steps": "auto",
}  # fmt: skip


def test_every_setting_can_be_said_in_every_way() -> None:
    names = [item.name for item in tunables()]
    assert sorted(GOOD) == sorted(names), "give the new setting a value above"
    by_variable = {item.metadata["variable"]: GOOD[item.name] for item in tunables()}
    wanted = effective([values_in(by_variable)]).settings
    by_option = {item.metadata["flag"][2:]: getattr(wanted, item.name) for item in tunables()}
    assert effective([from_values(by_option)]).settings == wanted
    assert all(getattr(wanted, name) != getattr(Settings(), name) for name in names)


def test_which_source_wins() -> None:
    variables = values_in({"RINGCOMM_LATE_AFTER": "2", "RINGCOMM_DEAD_AFTER": "2"})
    flags = [SettingValue("late_after_s", "3", "--late-after 3", "--late-after")]
    found = effective([variables, flags])
    assert (found.settings.late_after_s, found.settings.dead_after_s) == (3.0, 2.0)
    assert found.sources == {"late_after_s": "--late-after", "dead_after_s": "RINGCOMM_DEAD_AFTER"}


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, {"fusion_bytes": 1 << 20}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_bytes": 0}),
        ({"HOROVOD_TIMELINE": "t.json"}, {"timeline": "t.json"}), ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
        ({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a"}, {}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"},
         {"late_after_s": 0.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, {}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}, {"late_after_s": 9.0}),
        ({"HOROVOD_START_TIMEOUT": "9"}, {"start_timeout_s": 9.0}),
        ({"HOROVOD_GLOO_IFACE": "eth0"}, {"iface": "eth0"}),
        ({"HOROVOD_START_TIMEOUT": "", "HOROVOD_CYCLE_TIME": "9", "HOROVOD_LOG_LEVEL": "debug"}, {}),
    ],
)  # fmt: skip
def test_horovods_variables(environ: Dict[str, str], changes: Dict[str, Any]) -> None:
    assert effective([horovod_settings(environ)]).settings == Settings(**changes)


def test_what_horovods_variables_ask_for_in_vain_is_said() -> None:
    line, other = horovod_without_effect({"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_AUTOTUNE": "1"})
    assert line == "HOROVOD_AUTOTUNE has no effect: ringcomm does not tune itself."
    assert other.startswith("HOROVOD_CYCLE_TIME has no effect: ")
    assert horovod_without_effect({"HOROVOD_AUTOTUNE": "0"}) == []


def test_variables_that_a_program_sets_itself() -> None:
    """ringrun has applied those that were there when it started the program."""
    before = {"HOROVOD_START_TIMEOUT": "4", "HOROVOD_FUSION_THRESHOLD": "1024", "HOME": "/me"}
    environ = {**before, **horovod_counted(before)}
    assert horovod_settings_of_program(environ) == []
    environ.update(HOROVOD_START_TIMEOUT="9", HOROVOD_TIMELINE="DYNAMIC")
    (found,) = horovod_settings_of_program(environ)
    assert (found.name, found.text) == ("start_timeout_s", "9")
    # A program that ringrun has not started with --horovod.
    assert [item.name for item in horovod_settings_of_program(before)] == ["fusion_bytes", "start_timeout_s"]
