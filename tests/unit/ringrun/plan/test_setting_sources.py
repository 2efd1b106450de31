"""Every setting from every source, and which of them wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.configuration.settings import Settings, SettingValue, effective, tunables, values_in
from ringcomm.errors import ConfigError
from ringrun.plan import horovod
from ringrun.plan.setting_sources import (
    from_values,
    rows_of,
    shown_value,
    without_conflicts,
)

HOROVOD_PAGE = Path(__file__).resolve().parents[4] / "docs" / "horovod.md"
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


def test_a_bad_variable_of_horovods_is_named() -> None:
    with pytest.raises(ConfigError, match=r"HOROVOD_START_TIMEOUT='\(None,\)' cannot be used"):
        effective([horovod.from_environment({"HOROVOD_START_TIMEOUT": "(None,)"})])


def test_two_flags_for_one_setting() -> None:
    one = SettingValue("fusion_bytes", "32M", "--fusion-threshold 32M", "--fusion-threshold")
    other = SettingValue("fusion_bytes", "64M", "--fusion-threshold-mb 64", "--fusion-threshold-mb")
    assert without_conflicts([one, other._replace(text="32M")]) == [one]
    with pytest.raises(ConfigError, match="--fusion-threshold 32M and --fusion-threshold-mb 64"):
        without_conflicts([one, other])


def test_from_a_program() -> None:
    found = effective(
        [from_values({"late_after_s": 2, "encrypt": True, "fusion_bytes": 0, "transport": "tcp"})]
    )
    assert found.settings == Settings(late_after_s=2.0, encrypt=True, fusion_bytes=0, transport="tcp")
    with pytest.raises(ConfigError, match="no setting 'time'"):
        from_values({"time": 2})
    with pytest.raises(ConfigError, match="late_after_s=True: this setting"):
        from_values({"late_after_s": True})
    with pytest.raises(ConfigError, match="no setting 'timeout_s'"):
        from_values({"timeout_s": 2})
    with pytest.raises(ConfigError, match="transport='ip' cannot be used"):
        effective([from_values({"transport": "ip"})])


def test_what_a_program_says_by_the_names_of_options() -> None:
    by_field = from_values({"fusion_bytes": "32M", "late_after_s": 2.5, "transport": "tcp"})
    dashes = ("fusion-threshold", "late-after", "transport")
    for names in (dashes, tuple(name.replace("-", "_") for name in dashes)):
        by_option = from_values(dict(zip(names, ("32M", 2.5, "tcp"))))
        assert effective([by_option]).settings == effective([by_field]).settings
    with pytest.raises(ConfigError, match="no setting 'fusion'.*fusion_threshold"):
        from_values({"fusion": 1})


def test_shown_values_parse_again() -> None:
    for item in tunables():
        for value in (item.default, item.metadata["parse"](GOOD[item.name])):
            assert item.metadata["parse"](shown_value(item.name, value)) == value, item.name
    assert shown_value("fusion_bytes", 3 << 20) == "3M" and shown_value("fusion_bytes", 0) == "0"


def test_the_rows_of_all_settings() -> None:
    rows = rows_of(effective([values_in({"RINGCOMM_FUSION_THRESHOLD": "3145728"})]))
    assert len(rows) == len(tunables()) and ("late-after", "600", "default") in rows
    assert ("fusion-threshold", "3M", "RINGCOMM_FUSION_THRESHOLD") in rows


def test_names_that_are_known_twice_mean_one_thing() -> None:
    native = {item.metadata["flag"] for item in tunables()}
    assert not native & {name.flag for name in horovod.NAMES}
    assert not native & {*horovod.REFUSED, *horovod.IGNORED}
    assert {name.setting for name in horovod.NAMES} <= {item.name for item in tunables()}
    assert set(horovod.VALUES) <= {*horovod.REFUSED, *horovod.IGNORED}
    assert not set(horovod.REFUSED) & set(horovod.IGNORED)


def test_the_page_says_which_of_horovodruns_flags_have_no_effect() -> None:
    rows = [line.split("|")[1:3] for line in HOROVOD_PAGE.read_text().splitlines() if line.startswith("| `-")]
    said = {flag: text.strip() for names, text in rows for flag in re.findall(r"`(-[\w-]+)", names)}
    assert {*horovod.REFUSED, *horovod.IGNORED} <= set(said)
    for flag, text in said.items():
        if flag in horovod.REFUSED:
            assert text.startswith("an error"), flag
        elif flag in horovod.IGNORED:
            noted, silent = "accepted; a message says that it has no effect", "accepted without effect"
            assert text.startswith(noted if horovod.IGNORED[flag] else silent), flag
        else:
            assert "no effect" not in text and "without effect" not in text, flag


def test_variables_that_a_program_sets_itself() -> None:
    """ringrun has applied those that were there when it started the program."""
    before = {"HOROVOD_START_TIMEOUT": "4", "HOROVOD_FUSION_THRESHOLD": "1024", "HOME": "/me"}
    environ = {**before, **horovod.counted(before)}
    assert horovod.from_program(environ) == []
    environ.update(HOROVOD_START_TIMEOUT="9", HOROVOD_TIMELINE="DYNAMIC")
    assert [(item.name, item.text) for item in horovod.from_program(environ)] == [("start_timeout_s", "9")]
    # A program that ringrun has not started with --horovod.
    assert [item.name for item in horovod.from_program(before)] == ["fusion_bytes", "start_timeout_s"]
