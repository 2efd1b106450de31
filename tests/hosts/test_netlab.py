"""The lab itself: faults end with it, labs do not disturb each other, and nothing of one is left."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from tests.hosts import netlab_system as system
from tests.hosts.netlab import Host, Lab, wait_for

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.release

HOLD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest is a background job
from tests.hosts.netlab import Lab
lab = Lab("jetson1").start()
print(lab.number, lab.pid_namespace("jetson1"), flush=True)
signal.pause()
"""


def ssh(lab: Lab, host: str, command: str) -> str:
    done = subprocess.run(
        [*lab.ssh_command.split(), host, command], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def out(lab: Lab, host: str, *argv: str) -> str:
    return str(lab.run(host, argv).stdout).strip()


def test_hosts_and_faults_of_their_links(lab: Lab) -> None:
    assert ssh(lab, lab.addresses("jetson2")[0], "hostname") == "jetson2"
    assert ssh(lab, "jetson1", "getent hosts $(hostname)").split() == ["127.0.1.1", "jetson1"]
    assert "172.17.0.1/16" in out(lab, "jetson1", "ip", "-4", "-o", "addr", "show", "dev", "docker0")
    lab.cut("jetson1", ["jetson2"])
    with pytest.raises(KeyError):
        lab.cut("jetson1", ["jetson3"])
    lab.shape("jetson1", "wlan", "1mbit")
    lab.unplug("jetson2", "eth")
    assert out(lab, "jetson2", "cat", "/sys/class/net/eth0/carrier") == "0"
    lab.kill_host("jetson2")
    assert lab.processes("jetson2") == []
    lab.restore()
    assert [ssh(lab, name, "hostname") for name in ("jetson1", "jetson2")] == ["jetson1", "jetson2"]
    assert "20Mbit" in out(lab, "jetson1", "tc", "qdisc", "show", "dev", "wlan0")


def things(number: int) -> List[str]:
    """Return what is there of a lab."""
    links = [link["ifname"] for link in system.ip_json(None, "link", "show")]
    routes = system.ip(None, "route", "show") + system.ip(None, "-6", "route", "show")
    found = [name for name in links if re.match(rf"rl{number}\D", name)] + system.netns_of(number)
    found += [net for pair in system.networks(number).values() for net in pair if net in routes]
    return found + [path.name for path in system.RUN_DIR.glob(str(number))]


def leftovers(number: int) -> List[str]:
    """Return what is there of a lab that has ended, if no other one has taken its number since."""
    fd = system.lock(system.RUN_DIR / f"{number}.lock", fcntl.LOCK_EX)
    if fd is None:
        return []
    found = things(number)
    system.release(number, fd)
    return found


def test_close_leaves_nothing(able: None) -> None:
    with Lab() as lab:
        assert things(lab.number)
        namespaces = [lab.pid_namespace(name) for name in ("jetson1", "jetson2")]
        with lab.popen("jetson1", ["sleep", "1000"]):
            lab.close()
    assert [system.alive_in(namespace) for namespace in namespaces] == [[], []]
    assert leftovers(lab.number) == []
    lab = Lab("jetson1", Host("jetson2", eth="a-name-that-is-too-long"))
    with pytest.raises(system.LabError):
        lab.start()
    assert leftovers(lab.number) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_nothing(able: None, how: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=pipe, stderr=pipe) as p:
        try:
            assert p.stdout is not None
            number, namespace = (int(word) for word in p.stdout.readline().split())
            assert things(number)
            p.send_signal(how)
            p.wait(30)
        finally:
            p.kill()
    wait_for(lambda: not system.alive_in(namespace), 10, "the end of the hosts")
    if how == signal.SIGKILL:
        system.cleanup_stale()
    assert leftovers(number) == []


@pytest.mark.parametrize(("variable", "outcome"), [(None, "1 skipped"), ("CI", "1 error")])
def test_without_the_means_tests_are_skipped_or_fail(able: None, variable: str | None, outcome: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "RINGCOMM_REQUIRE_HOSTS")}
    env.update({variable: "true"} if variable else {})
    argv = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-m", "pytest", "-rs", "--tier", "all"]
    argv += ["-p", "no:cacheprovider", "tests/hosts/test_netlab.py::test_hosts_and_faults_of_their_links"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert outcome in done.stdout, done.stdout
    assert "cannot make several hosts here" in done.stdout
    assert "Operation not permitted" in done.stdout
