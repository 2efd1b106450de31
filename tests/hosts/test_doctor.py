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
BUSY = ("other programs use", "MB of memory", "swapped out", " MB free")
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
def test_one_machine_under_two_names_and_a_wrong_hosts_file(wired: Lab, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.9.9.9 jetson2\n")
    wired.run("jetson2", ["mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts"])
    found = problems(wired, hosts=f"localhost,jetson1,{wired.addresses('jetson1')[0]},jetson2")
    row = one(found, "are one machine, which calls itself jetson1", "getent hosts jetson1")
    assert row["hosts"] == ["jetson1", wired.addresses("jetson1")[0]]
    assert one(found, "its own name jetson2 leads to 10.9.9.9", "/etc/hosts")["hosts"] == ["jetson2"]


SITE = """
import time
true_time = time.time
time.time = lambda: true_time() + 3600
"""


@pytest.mark.release
def test_software_clock_threads_and_a_slow_shell(wired: Lab, tmp_path: Path) -> None:
    for name, version in (("numpy", "0.9.1"), ("torch", "99.1"), ("psutil", "6.0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    scripts = {
        "jetson1": f"sleep 3.2\nexport PYTHONPATH={tmp_path}",
        "jetson2": "export OMP_NUM_THREADS=64\nset -- -S \"$@\"",  # -S: no packages
    }
    options = []
    for host, lines in scripts.items():
        (tmp_path / host).write_text(f'#!/bin/sh\n{lines}\nexec {sys.executable} "$@"\n')
        (tmp_path / host).chmod(0o755)
        options += ["--python", f"{host}={tmp_path / host}"]
    data = examined(wired, *options)
    found = data["problems"]
    # A note, where the host's processor was busy meanwhile, as it may be beside other tests.
    assert one([*found, *data["notes"]], "the login took", "time ssh jetson1 true")["hosts"] == ["jetson1"]
    assert one(found, "different versions of numpy", "jetson1 0.9.1", "the same version everywhere")
    assert one(found, "different versions of torch", "jetson1 99.1")
    assert one(found, "its clock is 3600 s ahead of that of localhost", "set-ntp")["hosts"] == ["jetson1"]
    assert one(found, "has no numpy", "--provision")["hosts"] == ["jetson2"]
    assert one(found, "OMP_NUM_THREADS=64 for each of 1 ranks", "unset it")["hosts"] == ["jetson2"]


@pytest.mark.release
def test_memory_heat_governor_and_limits(wired: Lab, tmp_path: Path) -> None:
    """The kernel's files are replaced on one host: these faults cannot be made on a shared machine."""
    text = "MemTotal: 4000000 kB\nMemAvailable: 90000 kB\nSwapTotal: 2000000 kB\nSwapFree: 100 kB\n"
    (tmp_path / "meminfo").write_text(text)
    wired.run("jetson1", ["mount", "--bind", str(tmp_path / "meminfo"), "/proc/meminfo"])
    files = {
        "/sys/class/thermal": {"thermal_zone0/temp": "91000"},
        "/sys/devices/system/cpu/cpu0": {
            "cpufreq/scaling_governor": "powersave", "cpufreq/scaling_max_freq": "1200000",
            "cpufreq/cpuinfo_max_freq": "2200000",
        },
        "/proc/sys/kernel": {"yama/ptrace_scope": "1"},
    }  # fmt: skip
    for folder, contents in files.items():
        lines = [f"mount -t tmpfs none {folder}"]
        for name, value in contents.items():
            lines += [f"mkdir -p {folder}/{os.path.dirname(name)}", f"echo {value} >{folder}/{name}"]  # noqa: PTH120
        wired.run("jetson1", ["sh", "-ec", "\n".join(lines)])
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec taskset -c 0 {sys.executable} "$@"\n')
    script.chmod(0o755)
    done = doctor(wired, "--json", "--python", f"jetson1={script}", hosts="localhost,jetson1:2,jetson2")
    rows = [row for row in json.loads(done.stdout)["problems"] if row["hosts"] == ["jetson1"]]
    for words in (
        ("92 MB of memory are free", "end other programs"),
        ("2048 MB are swapped out", "end other programs"),
        ("91 °C", "a fan"),
        ("its governor is powersave", "cpupower"),
        ("ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"),
        ("its programs may use 1 of", "--cpuset-cpus"),
    ):
        one(rows, *words)


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


@pytest.mark.release
def test_copied_images(wired: Lab, tmp_path: Path) -> None:
    (tmp_path / "machine-id").write_text("1" * 32 + "\n")
    for host in ("jetson1", "jetson2"):
        wired.run(host, ["mount", "--bind", str(tmp_path / "machine-id"), "/etc/machine-id"])
    row = one(problems(wired), "same machine id", "systemd-machine-id-setup")
    assert row["hosts"] == ["jetson1", "jetson2"]


@pytest.mark.release
def test_one_address_for_two_hosts(wired: Lab) -> None:
    for host in ("jetson1", "jetson2"):
        wired.run(host, ["ip", "address", "add", "10.99.0.7/24", "dev", wired.iface(host)])
    one(problems(wired), "have the same address 10.99.0.7")


@pytest.mark.release
def test_two_interfaces_in_one_subnet(wired: Lab) -> None:
    address = next(text for text in wired.addresses("jetson1") if ":" not in text)
    other = f"{address.rpartition('.')[0]}.250/24"
    wired.run("jetson1", ["ip", "link", "add", "spare0", "type", "veth", "peer", "name", "spare1"])
    wired.run("jetson1", ["ip", "address", "add", other, "dev", "spare0"])
    for iface in ("spare0", "spare1"):
        wired.run("jetson1", ["ip", "link", "set", iface, "up"])
    row = one(problems(wired), "are both in", "--iface jetson1=")
    assert row["hosts"] == ["jetson1"]


@pytest.mark.release
def test_a_full_disk_and_few_files(wired: Lab, tmp_path: Path) -> None:
    wired.run("jetson1", ["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"])
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit -n 80\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    done = doctor(wired, "--json", "--python", f"jetson2={script}")
    found = json.loads(done.stdout)["problems"]
    assert one(found, "/dev/shm has 1 MB free")["hosts"] == ["jetson1"]
    assert one(found, "may open 80 files", "ulimit -n")["hosts"] == ["jetson2"]


@pytest.mark.release
def test_a_noisy_shell_an_old_python_and_a_missing_directory(wired: Lab, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "Welcome to jetson1"\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    found = problems(wired, "--python", f"jetson1={script}", "--python", "jetson2=/no/python")
    assert one(found, "Welcome to jetson1", ".bashrc")["hosts"] == ["jetson1"]
    assert one(found, "no Python at /no/python")["hosts"] == ["jetson2"]
    found = problems(wired, "--cwd", "jetson2=/nonexistent")
    assert one(found, "does not exist", "--ship")["hosts"] == ["jetson2"]


@pytest.mark.release
def test_a_quota_of_a_control_group(
    wired: Lab, quota: Callable[[float], Path], tmp_path: Path
) -> None:
    group = quota(0.3)
    script = tmp_path / "python"
    burn = f"{sys.executable} -c 'sum(range(10**7))'"  # uses up what it may use
    script.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\n{burn}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    found = problems(wired, "--python", f"localhost={script}")
    row = one(found, "control group may use 0.3 of", "was throttled in", "docker run --cpus")
    assert row["hosts"] == ["localhost"]


@pytest.mark.release
def test_many_ranks_on_few_cores(wired: Lab) -> None:
    cores = len(os.sched_getaffinity(0))
    row = one(problems(wired, hosts=f"localhost,jetson1:{cores + 1}"), "ranks on", "as many ranks as cores")
    assert row["hosts"] == ["jetson1"]
