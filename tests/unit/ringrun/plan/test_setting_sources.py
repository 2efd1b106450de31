"""Every setting from every source, and which of them wins."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.config import Settings
from ringcomm.errors import ConfigError
from ringrun.plan import horovod, setting_sources
from ringrun.plan.horovod import SettingValue
from ringrun.plan.setting_sources import (
    describe,
    effective,
    from_environment,
    from_file,
    from_values,
    shown_value,
    without_conflicts,
)

RINGRUN_PAGE = Path(__file__).resolve().parents[4] / "docs" / "ringrun.md"
GOOD: Dict[str, str] = {
    "iface": "eth0", "start_timeout_s": "7", "timeout_s": "8", "segment_bytes": "64K", "spin_us": "9",
    "algorithm": "ring", "transport": "tcp", "congestion": "cubic", "fusion_bytes": "3M", "cycle_ms": "2.5",
    "stall_warning_s": "11", "late_after_s": "12", "dead_after_s": "13",
    "measure": "0", "timeline": "t.json",
    "flight_recorder": "50", "diagnose_dir": "flights", "check_every": "100",
    "verbose": "1",
    "encrypt": "1", "threads": "3", "compression": "int8", "advise": "1",
    "local_steps": "auto",
}  # fmt: skip

HOROVOD_FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: 'horovod_autotune_log.txt'
  warmup_samples: 5
timeline:
  filename: 'horovod_timeline.json'
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  gloo_timeout_seconds: 60
logging:
  level: INFO
  hide_timestamp: true
"""


def test_every_setting_can_be_said_in_every_way() -> None:
    names = [item.name for item in fields(Settings)]
    assert sorted(GOOD) == sorted(names), "give the new setting a value above"
    by_variable = {item.metadata["variable"]: GOOD[item.name] for item in fields(Settings)}
    wanted = effective([from_environment(by_variable)]).settings
    content = "".join(f"{item.metadata['flag'][2:]}: {GOOD[item.name]}\n" for item in fields(Settings))
    assert effective([from_file(content, "f")]).settings == wanted
    assert effective([from_file(content.replace("-", "_"), "f")]).settings == wanted
    assert all(getattr(wanted, name) != getattr(Settings(), name) for name in names)


def test_which_source_wins() -> None:
    file = from_file("timeout: 1\ncycle-time: 1.5\nspin-us: 1\n", "f.yaml")
    variables = from_environment({"RINGCOMM_TIMEOUT": "2", "RINGCOMM_CYCLE_TIME": "2"})
    flags = [SettingValue("timeout_s", "3", "--timeout 3", "--timeout")]
    found = effective([file, variables, flags])
    assert (found.settings.timeout_s, found.settings.cycle_ms, found.settings.spin_us) == (3.0, 2.0, 1.0)
    assert found.sources == {
        "timeout_s": "--timeout", "cycle_ms": "RINGCOMM_CYCLE_TIME", "spin_us": "f.yaml, line 3",
    }  # fmt: skip


def test_a_file_of_horovods() -> None:
    found = effective([from_file(HOROVOD_FILE, "f")]).settings
    assert found == Settings(
        fusion_bytes=32 << 20, cycle_ms=10.0, timeline="horovod_timeline.json",
        stall_warning_s=120.0, late_after_s=240.0, timeout_s=60.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("timeuot: 3", ["f, line 1", "'timeuot'", "Did you mean timeout?"]),
        ("params:\n  fusion_treshold_mb: 3", ["f, line 2", "params.fusion-threshold-mb"]),
        ("param:\n  cycle_time_ms: 3", ["f, line 2", "params.cycle-time-ms"]),
        ("timeout: soon", ["f, line 1: timeout: 'soon' cannot be used", "must be a number"]),
        ("params:\n  fusion_threshold_mb: 1.5", ["f, line 2: params.fusion_threshold_mb: '1.5' cannot"]),
        ("controller: mpi", ["f, line 1", "no MPI"]),
        ("xyz: 3", ["there is no setting 'xyz'. `ringrun --print-config`"]),
    ],
)
def test_bad_files(content: str, words: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        effective([from_file(content, "f")])
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, {"fusion_bytes": 1 << 20}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_bytes": 0}),
        ({"HOROVOD_CYCLE_TIME": "3.5"}, {"cycle_ms": 3.5}),
        ({"HOROVOD_TIMELINE": "t.json"}, {"timeline": "t.json"}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
        ({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a"}, {}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, {"stall_warning_s": 5.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"},
         {"stall_warning_s": 0.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, {}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}, {"late_after_s": 9.0}),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "9"}, {"timeout_s": 9.0}),
        ({"HOROVOD_START_TIMEOUT": "9"}, {"start_timeout_s": 9.0}),
        ({"HOROVOD_GLOO_IFACE": "eth0"}, {"iface": "eth0"}),
        ({"HOROVOD_CYCLE_TIME": "", "HOROVOD_LOG_LEVEL": "debug"}, {}),
    ],
)  # fmt: skip
def test_horovods_variables(environ: Dict[str, str], changes: Dict[str, Any]) -> None:
    assert effective([horovod.from_environment(environ)]).settings == Settings(**changes)


def test_what_horovods_variables_ask_for_in_vain_is_said() -> None:
    (line,) = horovod.without_effect({"HOROVOD_AUTOTUNE": "1"})
    assert line == "HOROVOD_AUTOTUNE has no effect: ringcomm does not tune itself."
    assert horovod.without_effect({"HOROVOD_AUTOTUNE": "0"}) == []


def test_a_bad_variable_of_horovods_is_named() -> None:
    with pytest.raises(ConfigError, match=r"HOROVOD_CYCLE_TIME='\(None,\)' cannot be used"):
        effective([horovod.from_environment({"HOROVOD_CYCLE_TIME": "(None,)"})])


def test_two_flags_for_one_setting() -> None:
    one = SettingValue("fusion_bytes", "32M", "--fusion-threshold 32M", "--fusion-threshold")
    other = SettingValue("fusion_bytes", "64M", "--fusion-threshold-mb 64", "--fusion-threshold-mb")
    assert without_conflicts([one, other._replace(text="32M")]) == [one]
    with pytest.raises(ConfigError, match="--fusion-threshold 32M and --fusion-threshold-mb 64"):
        without_conflicts([one, other])


def test_from_a_program() -> None:
    found = effective(
        [from_values({"timeout_s": 2, "encrypt": True, "fusion_bytes": 0, "transport": "tcp"})]
    )
    assert found.settings == Settings(timeout_s=2.0, encrypt=True, fusion_bytes=0, transport="tcp")
    with pytest.raises(ConfigError, match="no setting 'time'"):
        from_values({"time": 2})
    with pytest.raises(ConfigError, match="timeout_s=True: this setting"):
        from_values({"timeout_s": True})
    with pytest.raises(ConfigError, match="transport='ip' cannot be used"):
        effective([from_values({"transport": "ip"})])


def test_what_a_program_says_by_the_names_of_options() -> None:
    by_field = from_values({"fusion_bytes": "32M", "timeout_s": 2.5, "transport": "tcp"})
    for names in (("fusion-threshold", "timeout", "transport"), ("fusion_threshold", "timeout", "transport")):
        by_option = from_values(dict(zip(names, ("32M", 2.5, "tcp"))))
        assert effective([by_option]).settings == effective([by_field]).settings
    with pytest.raises(ConfigError, match="no setting 'fusion'.*fusion_threshold"):
        from_values({"fusion": 1})


def test_shown_values_parse_again() -> None:
    for item in fields(Settings):
        for value in (item.default, item.metadata["parse"](GOOD[item.name])):
            assert item.metadata["parse"](shown_value(item.name, value)) == value, item.name
    assert shown_value("fusion_bytes", 3 << 20) == "3M" and shown_value("fusion_bytes", 0) == "0"


def test_the_table() -> None:
    lines = describe(effective([from_environment({"RINGCOMM_FUSION_THRESHOLD": "3145728"})])).splitlines()
    assert len(lines) == 1 + len(fields(Settings))
    assert [line.split() for line in lines if line.startswith("fusion")] == [
        ["fusion-threshold", "3M", "RINGCOMM_FUSION_THRESHOLD"]
    ]


def test_names_that_are_known_twice_mean_one_thing() -> None:
    native = {item.metadata["flag"] for item in fields(Settings)}
    assert not native & {name.flag for name in horovod.NAMES}
    assert not native & {*horovod.REFUSED, *horovod.IGNORED}
    assert {name.setting for name in horovod.NAMES} <= {item.name for item in fields(Settings)}
    assert set(horovod.VALUES) <= {*horovod.REFUSED, *horovod.IGNORED}
    assert not set(horovod.REFUSED) & set(horovod.IGNORED)
    assert setting_sources.SettingValue is SettingValue


def test_the_page_says_which_of_horovodruns_flags_have_no_effect() -> None:
    rows = [line.split("|")[1:3] for line in RINGRUN_PAGE.read_text().splitlines() if line.startswith("| `-")]
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
    before = {"HOROVOD_CYCLE_TIME": "4", "HOROVOD_FUSION_THRESHOLD": "1024", "HOME": "/me"}
    environ = {**before, **horovod.counted(before)}
    assert horovod.from_program(environ) == []
    environ.update(HOROVOD_CYCLE_TIME="9", HOROVOD_TIMELINE="DYNAMIC")
    assert [(item.setting, item.text) for item in horovod.from_program(environ)] == [("cycle_ms", "9")]
    # A program that ringrun has not started with --horovod.
    assert [item.setting for item in horovod.from_program(before)] == ["fusion_bytes", "cycle_ms"]
