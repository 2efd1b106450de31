"""Facts from recorded files: what this machine does not have."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

from ringrun.doctor import facts


def tree(root: Path, files: Dict[str, str]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return str(root)


def no_tool(argv: List[str]) -> Optional[str]:
    return None


BOARD = {
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "1000",
    "sys/class/net/eth0/address": "48:b0:2d:00:00:01",
    "sys/class/net/eth0/device/uevent": "",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/net/wlan0/operstate": "up",
    "sys/class/net/wlan0/phy80211/name": "phy0",
    "sys/class/thermal/thermal_zone0/temp": "41500",
    "sys/class/thermal/thermal_zone1/temp": "88000",
    "sys/class/thermal/cooling_device0/type": "fan",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1200000",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "2265600",
    "proc/self/schedstat": "300 100 7",
    "proc/loadavg": "0.50 0.40 0.30 1/200 1234",
    "proc/meminfo": "MemTotal:  8000000 kB\nMemAvailable: 300000 kB\nSwapTotal: 4000000 kB\nSwapFree: 0 kB",
    "proc/net/if_inet6": "fd00000000000000000000000000000b 02 40 00 80 eth0\n"
    "fe800000000000000000000000000001 02 40 20 80 eth0",
}


def test_interfaces_of_a_board(tmp_path: Path) -> None:
    def tool(argv: List[str]) -> Optional[str]:
        assert argv == ["iw", "dev", "wlan0", "get", "power_save"]
        return "Power save: on"

    found = {row["name"]: row for row in facts.interfaces(tree(tmp_path, BOARD), tool)}
    assert sorted(found) == ["eth0", "wlan0"]  # neither the loopback nor one that is down
    assert found["eth0"]["speed_mbit"] == 1000
    assert (found["eth0"]["wireless"], found["wlan0"]["wireless"]) == (False, True)
    assert (found["eth0"]["power_save"], found["wlan0"]["power_save"]) == (None, True)
    assert (found["eth0"]["virtual"], found["wlan0"]["virtual"]) == (False, True)
    assert ["fd00::b", 64] in found["eth0"]["addresses"]
    assert not any(address.startswith("fe80") for address, _ in found["eth0"]["addresses"])


def test_processors_of_a_board(tmp_path: Path) -> None:
    output = "NV Fan Mode:quiet\nNV Power Mode: MODE_15W\n2"
    found = facts.cpu(tree(tmp_path, BOARD), lambda argv: output if argv == ["nvpmodel", "-q"] else None)
    assert found["power_mode"] == "MODE_15W" and found["governor"] == "powersave"
    assert found["hottest"] == 88.0 and found["mhz"] == [1200000, 2265600] and found["load"] == 0.5
    assert found["waited"] == 0.25
    assert found["quota"] is None


def test_memory_of_a_board(tmp_path: Path) -> None:
    found = facts.memory(tree(tmp_path, BOARD))
    assert found == {"total": 8000000 << 10, "available": 300000 << 10, "swap": 4000000 << 10, "swap_free": 0}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/job\n0::/",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "30000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            0.3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/../a", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 0"}, None),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/0a1b",  # outermost in the container
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ({}, None),
    ],
)
def test_quotas(files: Dict[str, str], quota: Optional[float], tmp_path: Path) -> None:
    assert facts.cpu(tree(tmp_path, files), no_tool)["quota"] == quota


@pytest.mark.parametrize(
    ("files", "share"),
    [
        (
            {
                "proc/self/cgroup": "0::/a",
                "sys/fs/cgroup/a/cpu.stat": "usage_usec 9\nnr_periods 8\nnr_throttled 2",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/job",
                "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 4\nnr_throttled 3",
            },
            0.75,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/0a1b",
                "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 4\nnr_throttled 1",
            },
            0.25,
        ),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.stat": "nr_periods 0\nnr_throttled 0"}, 0.0),
        ({}, 0.0),
    ],
)
def test_throttling(files: Dict[str, str], share: float, tmp_path: Path) -> None:
    assert facts.cpu(tree(tmp_path, files), no_tool)["throttled"] == share


def test_a_system_without_any_of_it(tmp_path: Path) -> None:
    found: Dict[str, Any] = facts.collect(str(tmp_path / "none"), str(tmp_path), no_tool)
    assert found["interfaces"] == [] and found["machine_id"] is None and not found["cwd_exists"]
    assert found["cpu"]["hottest"] is None and found["memory"]["total"] is None
    assert found["packages"]["numpy"]


def test_a_module_whose_distribution_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensorflow of tensorflow_cpu; a folder of that name is no module."""
    tree(tmp_path, {"mxnet/__init__.py": "", "jax/notes.txt": ""})
    monkeypatch.setattr(facts, "PACKAGES", ("numpy", "mxnet", "jax"))
    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert facts._packages() == {"numpy": "?", "mxnet": "?"}


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_tools_that_are_missing_or_fail() -> None:
    assert facts.tool_output(["no-such-program"]) is None
    assert facts.tool_output(["false"]) is None
    assert facts.tool_output(["echo", "a b"]) == "a b"
