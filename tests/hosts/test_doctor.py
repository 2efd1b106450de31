"""``ringrun doctor`` on namespaced hosts: each fault is made, and has to be named with its remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from tests.hosts import netlab_system as system
from tests.hosts.netlab import Host, Lab

ROOT = Path(__file__).parents[2]
THREE = "localhost,jetson1,jetson2"
BUSY = ("MB of memory", " MB free")
"""Problems that this machine may have by itself."""


def doctor(lab: Lab, *more: str, hosts: str = THREE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **lab.environ(), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    return subprocess.run(
        [sys.executable, "-m", "ringrun", "doctor", "-H", hosts, *more],
        env=environment, capture_output=True, text=True, timeout=90, check=False,
        preexec_fn=system.interruptible,
    )  # fmt: skip


def problems(lab: Lab, *more: str, hosts: str = THREE) -> List[Dict[str, Any]]:
    """The problems that are the hosts', and not this machine's."""
    return list(examined(lab, *more, hosts=hosts)["problems"])


def examined(lab: Lab, *more: str, hosts: str = THREE) -> Dict[str, Any]:
    """All that the doctor found, but for what is this machine's."""
    done = doctor(lab, "--json", *more, hosts=hosts)
    assert done.stderr == "" and done.returncode in (0, 1), done.stderr
    data: Dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if data["problems"] else 0)
    for kind in ("problems", "notes"):
        data[kind] = [row for row in data[kind] if not any(text in row["text"] for text in BUSY)]
    return data


def one(found: List[Dict[str, Any]], *words: str) -> Dict[str, Any]:
    """The problem with these words."""
    rows = [row for row in found if all(word in f"{row['text']} {row['remedy']}" for word in words)]
    assert rows, f"no problem with {words} in {json.dumps(found, indent=1)}"
    return rows[0]


@pytest.fixture
def wired(make_lab: Callable[..., Lab]) -> Lab:
    """Hosts with one network, which is fast."""
    return make_lab(Host("jetson1", wlan=None), Host("jetson2", wlan=None))


def test_healthy_hosts_have_no_problem(wired: Lab) -> None:
    assert problems(wired) == []
    done = doctor(wired)
    for word in ("localhost", "jetson1", "jetson2", "MB/s", "Examined 3 hosts in"):
        assert word in done.stdout
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


def test_hosts_that_cannot_be_reached_by_ssh_are_named_and_the_others_are_examined(wired: Lab) -> None:
    found = problems(wired, hosts="localhost,jetson2,nowhere,badkey,unknownkey")
    assert one(found, "cannot be resolved")["hosts"] == ["nowhere"]
    assert one(found, "does not use passwords", "ssh-copy-id")["hosts"] == ["badkey"]
    assert one(found, "host key has not been accepted", "compare the fingerprint")["hosts"] == ["unknownkey"]
    assert {tuple(row["hosts"]) for row in found} == {("nowhere",), ("badkey",), ("unknownkey",)}


@pytest.mark.release
def test_faults_of_software_and_of_login_shells(wired: Lab, tmp_path: Path) -> None:
    for name, version in (("numpy", "0.9.1"), ("psutil", "6.0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    scripts = {
        "jetson1": f'echo "Welcome to jetson1"\nexport PYTHONPATH={tmp_path}',
        "jetson2": "ulimit -n 80\nset -- -S \"$@\"",  # -S: no packages
    }
    options = ["--cwd", "jetson2=/nonexistent"]
    for host, lines in scripts.items():
        (tmp_path / host).write_text(f'#!/bin/sh\n{lines}\nexec {sys.executable} "$@"\n')
        (tmp_path / host).chmod(0o755)
        options += ["--python", f"{host}={tmp_path / host}"]
    found = problems(wired, *options)
    assert one(found, "different versions of numpy", "jetson1 0.9.1", "the same version everywhere")
    for host, *words in (
        ("jetson1", "Welcome to jetson1", ".bashrc"),
        ("jetson2", "has no numpy", "--provision"),
        ("jetson2", "does not exist", "--ship"),
        ("jetson2", "may open 80 files", "ulimit -n"),
    ):
        assert one(found, *words)["hosts"] == [host]
    (row,) = [row for row in problems(wired, "--python", "jetson2=/no/python") if row["check"] == "login"]
    assert row["hosts"] == ["jetson2"] and "no Python at /no/python" in row["text"]


@pytest.mark.release
def test_firewalls_of_both_kinds(wired: Lab) -> None:
    wired.cut("jetson1", ["jetson2"], ways=("input",))
    found = problems(wired)
    row = one(found, "does not reach", "ufw allow from")
    assert sorted(row["hosts"]) == ["jetson1", "jetson2"] and "no answer" in row["text"]
    wired.heal("jetson1")
    wired.cut("jetson1", ["jetson2"], action="reject with tcp reset", ways=("input",))
    row = one(problems(wired), "jetson2 does not reach jetson1", "ufw allow from")
    address = wired.addresses("jetson1")[0]
    assert f"{address} (eth0): 'connection refused'" in row["text"]
    assert row["remedy"].endswith(f"sudo ufw allow from {address.rpartition('.')[0]}.0/24"), "not docker0's"


def test_a_slow_link_in_one_direction_and_in_both(wired: Lab) -> None:
    wired.shape("jetson2", "eth", "50mbit", ways=("output",))
    assert ["jetson2", "localhost"] in [row["hosts"] for row in problems(wired) if row["check"] == "links"]
    wired.shape("jetson2", "eth", "50mbit")
    found = problems(wired)
    assert {tuple(row["hosts"]) for row in found if row["check"] == "links"} >= {
        ("localhost", "jetson2"), ("jetson2", "localhost"),
    }  # fmt: skip
    assert "1 Gbit/s" in one(found, "jetson1 to jetson2")["remedy"]
