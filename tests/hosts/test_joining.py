"""Machines that join with a code: behind a firewall, found by discovery, behind routers with NAT; no ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from tests.hosts import netlab_plan as plans
from tests.hosts import netlab_system as system
from tests.hosts.job import ROOT, Job, job_processes
from tests.hosts.netlab import LOCALHOST, Lab, wait_for
from tests.hosts.test_doors import LINE, MEMBER, logins
from tests.support.service import free_port

pytest.importorskip("spake2")
FIREWALL = """
table inet office {
    chain input {
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iif lo accept
        meta l4proto { icmp, icmpv6 } accept
    }
}
"""


@pytest.fixture
def closed(lab: Lab) -> Iterator[str]:
    """jetson1, with the default of an office PC: nothing comes in, everything goes out."""
    lab.run("jetson1", ["nft", "-f", "-"], input=FIREWALL)
    yield "jetson1"
    lab.run("jetson1", ["nft", "delete table inet office"])


def join(lab: Lab, host: str, *words: str, network: str = "") -> subprocess.Popen[str]:
    """Join on a host, or with its name in another network namespace."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    argv = lab.command(host, [sys.executable, "-m", "ringrun", "join", "--yes", *words])
    if network:
        argv[argv.index("-n")] = f"--net=/run/netns/{network}"
    return subprocess.Popen(
        argv, env=system.tool_env(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, preexec_fn=system.interruptible,
    )  # fmt: skip


NAT = """
table inet home {{
    chain in {{
        type nat hook prerouting priority dstnat;
        ip daddr 203.0.113.9 tcp dport 443 dnat ip to {launcher}:{port}
    }}
    chain out {{ type nat hook postrouting priority srcnat; oifname {wan} masquerade; }}
    chain through {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname home ct status dnat accept
    }}
}}
"""
"""A router that lets nothing in, and nothing out but to one port of the launcher, which has another address
and number there, as behind a router that forwards it."""


@contextmanager
def behind_nat(lab: Lab, host: str, launcher: str, port: int) -> Iterator[str]:
    """Make a host a router, and yield the network namespace of a machine behind it: all have one address."""
    router = str(plans.netns_of(lab.number, host))
    inside = f"{router}-home"
    system.ip(None, "netns", "add", inside)
    system.ip_batch(router, [
        f"link add home type veth peer name eth0 netns {inside}", "addr add 192.168.178.1/24 dev home",
        "link set home up",
    ])  # fmt: skip
    system.ip_batch(inside, [
        "link set lo up", "addr add 192.168.178.20/24 dev eth0", "link set eth0 up",
        "route add default via 192.168.178.1",
    ])  # fmt: skip
    system.in_netns(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    rules = NAT.format(wan=lab.iface(host), launcher=launcher, port=port)
    system.in_netns(router, "nft", "-f", "-", stdin=rules)
    yield inside
    system.in_netns(router, "nft", "delete table inet home")
    system.ip(router, "link", "del", "home")
    system.ip(None, "netns", "del", inside)


def test_machines_without_ssh_train_with_the_launcher(lab: Lab, closed: str, tmp_path: Path) -> None:
    before = logins(lab)
    with Job(lab, "-H", "localhost,join:2", MEMBER) as job:
        found = job.wait_for_line(r"ringrun join \S+:(\d+) (\S+)")
        address = f"{lab.addresses('localhost')[0]}:{found[1]}"
        joined = [join(lab, closed, address, found[2]), join(lab, "jetson2", found[2])]
        assert job.finish() == 0, job.output
        said = [process.communicate(timeout=20)[0] for process in joined]
    assert [process.returncode for process in joined] == [0, 0], said
    rows = {int(row[0]): row for row in LINE.findall(job.output)}
    assert {row[2] for row in rows.values()} == {"jetson1", "jetson2", os.uname().nodename}, job.output
    assert {row[5] for row in rows.values()} == {"6"}, job.output
    assert logins(lab) == before
    wait_for(lambda: not job_processes(lab, "member.py"), 10, "the end of all processes")


def test_machines_behind_two_nats_train_over_one_port_of_the_launcher(lab: Lab) -> None:
    """No rank can dial another one; the two machines have the same address. All links are relayed."""
    before, launcher, port = logins(lab), lab.addresses(LOCALHOST)[0], free_port()
    with ExitStack() as stack:
        homes = {
            host: stack.enter_context(behind_nat(lab, host, launcher, port))
            for host in ("jetson1", "jetson2")
        }
        job = stack.enter_context(Job(lab, "--verbose", "-H", f"localhost,join:2@{port}", MEMBER))
        found = job.wait_for_line(r"ringrun join \S+ (\S+)")
        joined = [
            join(lab, host, "203.0.113.9:443", found[1], network=inside) for host, inside in homes.items()
        ]
        assert job.finish() == 0, job.output
        said = [process.communicate(timeout=20)[0] for process in joined]
    assert [process.returncode for process in joined] == [0, 0], said
    rows = {int(row[0]): row for row in LINE.findall(job.output)}
    assert {row[2] for row in rows.values()} == {"jetson1", "jetson2", os.uname().nodename}, job.output
    assert {row[5] for row in rows.values()} == {"6"}, job.output
    links = job.values(rf"<-> .* relayed over {os.uname().nodename}$")
    assert len(links) == 3, job.output
    assert "cannot reach each other: relayed over" in job.output
    assert logins(lab) == before
