"""Problems of single hosts: login, software, addresses, processors, memory, limits. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from typing import Any, Dict, Iterator, List

from ..plan.reaching import quoted
from .finding import BAD, NOTE, SLOW, Finding, is_usable
from .network import Examination

LOGIN_S = 3.0
MEMORY_BYTES, DISK_BYTES, SHM_BYTES = 500 << 20, 200 << 20, 64 << 20
FILES_SPARE, FILES_PER_RANK = 64, 14
HOT = 85.0
THROTTLED = 0.05
WAITED = 0.25
"""Above this share of time without a processor, a slow login is not reported."""


def host_findings(found: Examination, index: int) -> Iterator[Finding]:
    """Find the problems of the host with this index."""
    yield from _login(found, index)
    facts = found.facts[index]
    if facts is not None:
        for check in (_own_software, _own_addresses, _cpu, _memory, _limits):
            yield from check(found, index, facts)


def _login(found: Examination, index: int) -> Iterator[Finding]:
    name = found.hosts[index]
    if found.problems[index]:
        text = found.problems[index]
        text = text[len(name) + 2 :] if text.startswith(f"{name}: ") else text
        yield Finding(BAD, "login", (index,), text, "")
        return
    if found.noises[index]:
        first = found.noises[index].strip().partition("\n")[0][:60]
        yield Finding(
            SLOW, "login", (index,),
            f"its login shell prints {len(found.noises[index])} characters before a program runs "
            f"({quoted(first)})",
            "print in interactive shells only: begin ~/.bashrc with `case $- in *i*) ;; *) return;; esac`",
        )  # fmt: skip
    if found.starts_s[index] > LOGIN_S and index != found.local:
        waited = (found.facts[index] or {"cpu": {}})["cpu"].get("waited") or 0.0
        text = f"the login took {found.starts_s[index]:.1f} s"
        if waited > WAITED:
            text += f"; programs wait for its processors for {waited:.0%} of their time"
        yield Finding(
            NOTE if waited > WAITED else SLOW, "login", (index,), text,
            f"look what its login shell does: time ssh {name} true; UseDNS no in its sshd_config may help",
        )  # fmt: skip


def _own_software(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Finding]:
    if not facts["cwd_exists"] and index not in found.shipped:
        yield Finding(
            BAD, "software", (index,), "the directory in which ranks would run does not exist",
            f"make it, name another with --cwd {found.hosts[index]}=PATH, or send the code with --ship",
        )  # fmt: skip
    if "numpy" not in facts["packages"] and not found.provision:
        yield Finding(
            BAD, "software", (index,), f"{facts['executable']} has no numpy",
            f"start with --provision, or: {facts['executable']} -m pip install numpy",
        )  # fmt: skip


def _own_addresses(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Finding]:
    real = [iface for iface in facts["interfaces"] if is_usable(iface)]
    networks: Dict[str, List[str]] = defaultdict(list)
    for iface in real:
        for address, bits in iface["addresses"]:
            if ":" not in address:
                network = str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
                if iface["name"] not in networks[network]:
                    networks[network].append(iface["name"])
    for network, names in networks.items():
        if len(names) > 1:
            yield Finding(
                SLOW, "addresses", (index,), f"{' and '.join(names)} are both in {network}",
                f"take one of them: --iface {found.hosts[index]}={names[0]}; or sysctl -w "
                "net.ipv4.conf.all.arp_filter=1 there, so that answers leave by the right one",
            )  # fmt: skip
    own = [address for iface in facts["interfaces"] for address, _ in iface["addresses"]]
    if facts["own_name"] and facts["own_name"] not in own and not facts["own_name"].startswith("127."):
        yield Finding(
            SLOW, "addresses", (index,),
            f"its own name {facts['hostname']} leads to {facts['own_name']}, which is not its address",
            "correct the line of that name in its /etc/hosts; ringcomm does not use it, other programs do",
        )  # fmt: skip
    if not any(iface["addresses"] for iface in real):
        yield Finding(
            BAD, "addresses", (index,), "no network interface has an address", "look at `ip address` there"
        )


def _cpu(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Finding]:
    cpu, ranks, name = facts["cpu"], found.slots[index], found.hosts[index]
    cores = cpu["cores"] or 1

    def slow(text: str, remedy: str) -> Finding:
        return Finding(SLOW, "cpu", (index,), text, remedy)

    limited = cpu["quota"] is not None and cpu["quota"] < cores
    throttled = f"was throttled in {cpu['throttled']:.0%} of its periods"
    if limited or cpu["throttled"] > THROTTLED:
        may_use = f"may use {cpu['quota'] or cores:g} of {cores} cores"
        yield slow(
            f"its control group {may_use}, and {throttled}" if cpu["throttled"] else
            f"its control group {may_use}",
            "raise the quota of the container (docker run --cpus, CPUQuota= of the service)",
        )  # fmt: skip
    if cores < cpu["all_cores"]:
        yield slow(
            f"its programs may use {cores} of {cpu['all_cores']} cores",
            "look at `taskset -p 1` there, and at the container's --cpuset-cpus",
        )
    elif cores == 1:
        yield slow(
            "it has one core, which computes and serves the network",
            "give it less work than the others: docs/unequal.md",
        )
    if ranks > cores:
        yield slow(
            f"{ranks} ranks on {cores} core{'' if cores == 1 else 's'}",
            f"use as many ranks as cores: -H {name}:{cores}",
        )
    if cpu["governor"] == "powersave" and (cpu["mhz"][0] or 0) < (cpu["mhz"][1] or 0):
        yield slow("its governor is powersave", "sudo cpupower frequency-set -g performance")
    if cpu["hottest"] is not None and cpu["hottest"] >= HOT:
        yield slow(f"its processor has {cpu['hottest']:.0f} °C and will slow down", "cool it: a fan, dust")
    if cpu["power_mode"] not in (None, "MAXN", "MAXN_SUPER"):
        yield slow(f"its power mode is {cpu['power_mode']}", "sudo nvpmodel -m 0 && sudo jetson_clocks")
    if cpu["load"] > cores:
        yield Finding(
            NOTE, "cpu", (index,),
            f"other programs use its processors just now (load {cpu['load']:.1f} on {cores}): jobs would be "
            "slower meanwhile, and fast routes may be faster than measured",
            "see `top` there",
        )  # fmt: skip
    threads = facts["threads"].get("OMP_NUM_THREADS", "")
    if re.fullmatch("[0-9]{1,6}", threads) and int(threads) * ranks > cores:
        yield slow(
            f"OMP_NUM_THREADS={threads} for each of {ranks} ranks on {cores} cores",
            "unset it: ringrun then shares the cores",
        )


def _memory(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Finding]:
    memory = facts["memory"]
    if memory["available"] is not None and memory["available"] < MEMORY_BYTES:
        yield Finding(
            BAD, "memory", (index,), f"{memory['available'] / 1e6:.0f} MB of memory are free",
            "end other programs; a rank with PyTorch needs some 400 MB before its model",
        )  # fmt: skip
    if memory["swap"] and memory["swap_free"] is not None and memory["swap_free"] < memory["swap"] / 2:
        used = (memory["swap"] - memory["swap_free"]) / 1e6
        yield Finding(SLOW, "memory", (index,), f"{used:.0f} MB are swapped out", "end other programs")
    for path, free in facts["disks"].items():
        limit = SHM_BYTES if path == "/dev/shm" else DISK_BYTES
        if free is not None and free < limit:
            yield Finding(
                BAD, "memory", (index,), f"{path} has {free / 1e6:.0f} MB free",
                "remove files there" if path != "/dev/shm" else "enlarge it (docker run --shm-size=1g)",
            )  # fmt: skip


def _limits(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Finding]:
    files, ranks = facts["limits"]["nofile"], sum(found.slots)
    needed = FILES_SPARE + FILES_PER_RANK * ranks
    if 0 <= files < needed:
        yield Finding(
            BAD, "limits", (index,), f"a process may open {files} files; {ranks} ranks need some {needed}",
            "ulimit -n 4096, or `* - nofile 4096` in /etc/security/limits.conf",
        )  # fmt: skip
    if (facts["limits"]["ptrace_scope"] or 0) > 0 and found.slots[index] > 1:
        yield Finding(
            SLOW, "limits", (index,),
            f"kernel.yama.ptrace_scope is {facts['limits']['ptrace_scope']}: its ranks cannot read each "
            "other's memory, and use shared memory",
            "sudo sysctl kernel.yama.ptrace_scope=0, if you trust all programs of this user",
        )  # fmt: skip
