"""Facts from recorded files: what this machine does not have."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Dict

import pytest

from ringrun.doctor import probe as facts


def tree(root: Path, files: Dict[str, str]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return str(root)


BOARD = {
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/address": "48:b0:2d:00:00:01",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/net/wlan0/operstate": "up",
    "proc/meminfo": "MemTotal:  8000000 kB\nMemAvailable: 300000 kB",
    "proc/net/if_inet6": "fd00000000000000000000000000000b 02 40 00 80 eth0\n"
    "fe800000000000000000000000000001 02 40 20 80 eth0",
}


def test_facts_of_a_board(tmp_path: Path) -> None:
    found = facts.collect("/", tree(tmp_path, BOARD), lambda: "NV Fan Mode:quiet\nNV Power Mode: MODE_15W\n2")
    eth, wlan = found["interfaces"]  # neither the loopback nor one that is down
    assert (eth["name"], eth["mac"], wlan["name"]) == ("eth0", "48:b0:2d:00:00:01", "wlan0")
    assert ["fd00::b", 64] in eth["addresses"]
    assert not any(address.startswith("fe80") for address, _ in eth["addresses"])
    assert found["cpu"]["power_mode"] == "MODE_15W" and found["cpu"]["quota"] is None
    assert found["memory_bytes"] == 300000 << 10


def test_a_system_without_any_of_it(tmp_path: Path) -> None:
    found = facts.collect(str(tmp_path / "none"), str(tmp_path))
    assert found["interfaces"] == [] and found["machine_id"] is None and not found["cwd_exists"]
    assert found["memory_bytes"] is None and found["packages"]["numpy"]


def test_a_module_whose_distribution_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensorflow of tensorflow_cpu; a folder of that name is no module."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    tree(tmp_path, {"mxnet/__init__.py": "", "jax/notes.txt": ""})
    monkeypatch.setattr(facts, "PACKAGES", ("numpy", "mxnet", "jax"))
    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert facts._packages() == {"numpy": "?", "mxnet": "?"}
