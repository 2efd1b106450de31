"""Every setting from every source, and which of them wins."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from ringcomm.configuration.settings import Settings, SettingValue, effective, tunables, values_in
from ringcomm.errors import ConfigError
from ringrun.plan import horovod
from ringrun.plan.setting_sources import from_values, rows_of

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
        ({"HOROVOD_TIMELINE": "t.json"}, {"timeline": "t.json"}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
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
    assert effective([horovod.from_environment(environ)]).settings == Settings(**changes)


def test_what_horovods_variables_ask_for_in_vain_is_said() -> None:
    line, other = horovod.without_effect({"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_AUTOTUNE": "1"})
    assert line == "HOROVOD_AUTOTUNE has no effect: ringcomm does not tune itself."
    assert other.startswith("HOROVOD_CYCLE_TIME has no effect: ")
    assert horovod.without_effect({"HOROVOD_AUTOTUNE": "0"}) == []


def test_from_a_program() -> None:
    found = effective(
        [from_values({"late_after_s": 2, "encrypt": True, "fusion_bytes": 0, "transport": "tcp"})]
    )
    assert found.settings == Settings(late_after_s=2.0, encrypt=True, fusion_bytes=0, transport="tcp")
    dashed = from_values({"late-after": 2, "encrypt": True, "fusion_threshold": 0, "transport": "tcp"})
    assert effective([dashed]).settings == found.settings
    with pytest.raises(ConfigError, match="no setting 'time'.*fusion_threshold"):
        from_values({"time": 2})
    with pytest.raises(ConfigError, match="late_after_s=True: this setting"):
        from_values({"late_after_s": True})
    with pytest.raises(ConfigError, match="no setting 'timeout_s'"):
        from_values({"timeout_s": 2})
    with pytest.raises(ConfigError, match="transport='ip' cannot be used"):
        effective([from_values({"transport": "ip"})])


def test_the_rows_of_all_settings() -> None:
    rows = rows_of(effective([values_in({"RINGCOMM_FUSION_THRESHOLD": "3145728"})]))
    assert len(rows) == len(tunables()) and ("late-after", "600", "default") in rows
    assert ("fusion-threshold", "3M", "RINGCOMM_FUSION_THRESHOLD") in rows


def test_variables_that_a_program_sets_itself() -> None:
    """ringrun has applied those that were there when it started the program."""
    before = {"HOROVOD_START_TIMEOUT": "4", "HOROVOD_FUSION_THRESHOLD": "1024", "HOME": "/me"}
    environ = {**before, **horovod.counted(before)}
    assert horovod.from_program(environ) == []
    environ.update(HOROVOD_START_TIMEOUT="9", HOROVOD_TIMELINE="DYNAMIC")
    assert [(item.name, item.text) for item in horovod.from_program(environ)] == [("start_timeout_s", "9")]
    # A program that ringrun has not started with --horovod.
    assert [item.name for item in horovod.from_program(before)] == ["fusion_bytes", "start_timeout_s"]
