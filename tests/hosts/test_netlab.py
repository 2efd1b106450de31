"""The lab itself: that its hosts look like hosts, and that its faults are faults."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from tests.hosts import netlab_system as system
from tests.hosts.netlab import Host, Lab, wait_for

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.release
PORT = 4711

# Listens on one address, says so, and answers each connection's bytes with the same bytes until its end.
ECHO = """
import socket, sys, threading
def serve(peer):
    with peer:
        while True:
            data = peer.recv(1 << 16)
            if not data:
                return
            peer.sendall(data)
listener = socket.create_server((sys.argv[1], int(sys.argv[2])),
                                family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()
"""

# Prints the outcome of one connection with one exchange.
PROBE = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as peer:
        peer.sendall(b"x")
        print(peer.recv(1) == b"x")
except OSError as error:
    print(type(error).__name__)
"""

MakeLab = Callable[..., Lab]


def ssh(lab: Lab, host: str, command: str) -> str:
    done = subprocess.run(
        [*lab.ssh_command.split(), host, command], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def out(lab: Lab, host: str, *argv: str) -> str:
    return str(lab.run(host, argv).stdout).strip()


@contextmanager
def echo(lab: Lab, host: str, role: str = "eth") -> Iterator[str]:
    """An echo server on a host: its address."""
    address = lab.addresses(host, role)[0]
    argv = [sys.executable, "-c", ECHO, address, str(PORT)]
    with lab.popen(host, argv, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield address
        finally:
            server.kill()


def exchange(peer: socket.socket, data: bytes) -> bool:
    peer.sendall(data)
    received = b""
    while len(received) < len(data):
        part = peer.recv(1 << 20)
        if not part:
            return False
        received += part
    return received == data


def probe(lab: Lab, host: str, address: str, timeout: float = 10) -> str:
    return out(lab, host, sys.executable, "-c", PROBE, address, str(PORT), str(timeout))


# --- hosts ---


def test_ssh_reaches_every_host(lab: Lab) -> None:
    names = ["jetson1", "jetson2"]
    assert [ssh(lab, name, "hostname") for name in names] == names
    assert len({ssh(lab, name, "cat /proc/sys/kernel/random/boot_id") for name in names}) == 2
    for address in lab.addresses("jetson2"):
        assert ssh(lab, address, "hostname") == "jetson2"


def test_plain_ssh_works_in_the_labs_environment(lab: Lab) -> None:
    done = subprocess.run(
        ["ssh", "jetson1", "hostname"], capture_output=True, text=True, timeout=60, env=lab.environ()
    )
    assert (done.returncode, done.stdout) == (0, "jetson1\n"), done.stderr


@pytest.mark.parametrize(
    ("entry", "message"), [("unknownkey", "Host key verification failed"), ("badkey", "Permission denied")]
)
def test_ssh_entries_that_fail(lab: Lab, entry: str, message: str) -> None:
    argv = [*lab.ssh_command.split(), entry, "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 255
    assert message in done.stderr


def test_own_name_is_127_0_1_1_and_docker0_is_a_twin(lab: Lab) -> None:
    for name in ("jetson1", "jetson2"):
        assert ssh(lab, name, "getent hosts $(hostname)").split() == ["127.0.1.1", name]
        assert "172.17.0.1/16" in out(lab, name, "ip", "-4", "-o", "addr", "show", "dev", "docker0")
        assert out(lab, name, "cat", "/sys/class/net/docker0/carrier") == "1"
    assert "inet " in system.ip(None, "-4", "-o", "addr", "show", "dev", "docker0")


def test_shared_memory_is_private_and_files_are_shared(lab: Lab, tmp_path: Path) -> None:
    lab.run("jetson1", ["sh", "-c", f"echo 1 > /dev/shm/{lab.number}.test; echo 2 > {tmp_path}/file"])
    assert not Path(f"/dev/shm/{lab.number}.test").exists()
    assert lab.run("jetson2", ["test", "-e", f"/dev/shm/{lab.number}.test"], check=False).returncode == 1
    assert out(lab, "jetson2", "cat", str(tmp_path / "file")) == "2"
    assert out(lab, "jetson2", "pwd") == str(Path.cwd())


def test_nothing_of_the_lab_leaves_by_the_default_route(lab: Lab) -> None:
    for net, _ in system.networks(lab.number).values():
        assert system.ip(None, "route", "show", "type", "unreachable", net).strip()
    done = lab.run("jetson1", ["ip", "route", "get", "203.0.113.1"], check=False)
    assert "unreachable" in done.stderr.lower()


def test_processes_lists_what_runs_and_commands_die_with_their_starter(lab: Lab) -> None:
    wait_for(lambda: not lab.processes("jetson1"), 10, "an idle host")
    with lab.popen("jetson1", ["sleep", "1000"]) as sleeper:
        wait_for(lambda: any(line == "sleep 1000" for _, line in lab.processes("jetson1")), 10, "sleep")
        assert not any("sleep 1000" in line for _, line in lab.processes("jetson2"))
        sleeper.kill()
    wait_for(lambda: not lab.processes("jetson1"), 10, "the end of sleep")
    assert os.getpid() in [pid for pid, _ in lab.processes("localhost")]


def test_a_killed_host_closes_its_connections_and_boots_again(lab: Lab) -> None:
    with echo(lab, "jetson1") as address, socket.create_connection((address, PORT), timeout=20) as peer:
        assert exchange(peer, b"x")
        lab.kill_host("jetson1")
        try:
            assert peer.recv(1) == b""
        except ConnectionResetError:
            pass
    assert lab.processes("jetson1") == []
    lab.boot("jetson1")
    assert ssh(lab, "jetson1", "hostname") == "jetson1"


# --- faults ---


def test_shape_limits_both_ends_and_unshape_lifts_it(lab: Lab) -> None:
    def qdiscs() -> List[str]:
        near = system.sh("tc", "-n", f"rl{lab.number}.switch", "qdisc", "show", "dev", "p1e")
        return [out(lab, "jetson1", "tc", "qdisc", "show", "dev", "eth0"), near]

    lab.shape("jetson1", "eth0", "50mbit")
    assert all("tbf" in text and "50Mbit" in text for text in qdiscs())
    lab.unshape("jetson1", "eth0")
    assert not any("tbf" in text for text in qdiscs())


@pytest.mark.parametrize(("host", "role"), [("jetson1", "wlan"), ("jetson1", "eth"), ("localhost", "eth")])
def test_a_shaped_link_is_slow(lab: Lab, host: str, role: str) -> None:
    if role == "eth":
        lab.shape(host, role, "20mbit", "64kb", "50ms")
    with echo(lab, "jetson1", role) as address, socket.create_connection((address, PORT), timeout=60) as peer:
        start = time.monotonic()
        peer.sendall(bytes(1 << 20))
        received = 0
        while received < 1 << 20:
            received += len(peer.recv(1 << 20))
        # 8.4 Mbit at 20 Mbit/s; unshaped it takes a few ms. Only the lower bound is certain.
        assert time.monotonic() - start > 0.25


def test_cut_stalls_a_live_connection_and_heal_revives_it(lab: Lab) -> None:
    with echo(lab, "jetson1") as address, socket.create_connection((address, PORT), timeout=20) as peer:
        assert exchange(peer, b"before")
        lab.cut("jetson1")
        peer.sendall(b"during")
        peer.settimeout(0.3)
        with pytest.raises(socket.timeout):
            peer.recv(1)
        lab.heal("jetson1")
        peer.settimeout(20)
        assert peer.recv(100) == b"during"


def test_cut_spares_other_peers(lab: Lab) -> None:
    with echo(lab, "jetson1") as address:
        lab.cut("jetson1", ["jetson2"])
        assert probe(lab, "jetson2", address, 0.3) in ("timeout", "TimeoutError")
        assert probe(lab, "localhost", address) == "True"
        lab.heal("jetson2", ["jetson1"])
        assert probe(lab, "jetson2", address) == "True"
        lab.cut("localhost")
        assert probe(lab, "localhost", address, 0.3) in ("timeout", "TimeoutError")
        assert probe(lab, "jetson2", address) == "True"
    with pytest.raises(KeyError):
        lab.cut("jetson1", ["jetson3"])


def test_unplug_takes_the_carrier_and_plug_gives_it_back(lab: Lab) -> None:
    def carrier() -> str:
        return out(lab, "jetson1", "cat", "/sys/class/net/eth0/carrier")

    with echo(lab, "jetson1") as address, socket.create_connection((address, PORT), timeout=20) as peer:
        assert exchange(peer, b"before")
        lab.unplug("jetson1", "eth0")
        assert carrier() == "0"
        assert address in out(lab, "jetson1", "ip", "-o", "addr", "show", "dev", "eth0")
        peer.sendall(b"during")
        peer.settimeout(0.3)
        with pytest.raises(socket.timeout):
            peer.recv(1)
        lab.plug("jetson1", "eth0")
        assert carrier() == "1"
        peer.settimeout(20)
        assert peer.recv(100) == b"during"


def test_counters_move_where_the_traffic_is(lab: Lab) -> None:
    def total(counts: Dict[str, Any], iface: str) -> int:
        return int(sum(counts[iface]))

    size = 1 << 20
    before = {name: lab.counters(name) for name in ("jetson1", "jetson2", "localhost")}
    with echo(lab, "jetson1") as address, socket.create_connection((address, PORT), timeout=20) as peer:
        for _ in range(size >> 14):
            assert exchange(peer, bytes(1 << 14))
    moved = {
        (name, iface): total(lab.counters(name), iface) - total(counts, iface)
        for name, counts in before.items()
        for iface in counts
    }
    assert moved["jetson1", "eth0"] >= 2 * size
    assert moved["localhost", lab.iface("localhost")] >= 2 * size
    quiet = [("jetson1", "wlan0"), ("jetson1", "docker0"), ("jetson2", "eth0"), ("jetson2", "docker0")]
    assert all(moved[each] < size // 4 for each in [*quiet, ("localhost", lab.iface("localhost", "wlan"))])


def test_restore_undoes_everything(lab: Lab) -> None:
    lab.shape("jetson1", "wlan", "1mbit")
    lab.cut("jetson1")
    lab.unplug("jetson2", "eth")
    lab.kill_host("jetson2")
    lab.restore()
    assert [ssh(lab, name, "hostname") for name in ("jetson1", "jetson2")] == ["jetson1", "jetson2"]
    assert "20Mbit" in out(lab, "jetson1", "tc", "qdisc", "show", "dev", "wlan0")


# --- other kinds of labs ---


def test_ipv6_only(make_lab: MakeLab) -> None:
    lab = make_lab(ipv6_only=True)
    for name in ("jetson1", "jetson2"):
        assert ssh(lab, name, "hostname") == name
        for iface in ("eth0", "wlan0"):
            assert out(lab, name, "ip", "-4", "-o", "addr", "show", "dev", iface) == ""
    with echo(lab, "jetson1") as address:
        assert address == f"fd99:{lab.number}::11"
        assert probe(lab, "jetson2", address) == "True"
        lab.cut("jetson1", ["jetson2"])
        assert probe(lab, "jetson2", address, 0.3) in ("timeout", "TimeoutError")
        assert probe(lab, "localhost", address) == "True"


def test_hosts_may_differ(make_lab: MakeLab) -> None:
    lab = make_lab(
        "jetson1", Host("jetson2", eth="enp3s0", wlan="wlp2s0"), Host("nano", wlan=None, dual_stack=True)
    )
    assert [lab.iface(name) for name in ("jetson1", "jetson2", "nano")] == ["eth0", "enp3s0", "eth0"]
    names = {name: set(lab.counters(name)) for name in ("jetson1", "jetson2", "nano")}
    assert names["jetson2"] == {"lo", "enp3s0", "wlp2s0", "docker0", "vethc0ffee"}
    assert names["nano"] == {"lo", "eth0", "docker0", "vethc0ffee"}
    assert [ssh(lab, address, "hostname") for address in lab.addresses("nano")] == ["nano"] * 2
    lab.unplug("jetson2", "enp3s0")
    assert out(lab, "jetson2", "cat", "/sys/class/net/enp3s0/carrier") == "0"


def test_without_wlan_and_docker(make_lab: MakeLab) -> None:
    lab = make_lab("jetson1", no_wlan=True, docker=False)
    assert set(lab.counters("jetson1")) == {"lo", "eth0"}
    assert ssh(lab, "jetson1", "hostname") == "jetson1"


def test_two_labs_at_once(lab: Lab, make_lab: MakeLab) -> None:
    other = make_lab()
    assert other.number != lab.number
    assert not set(other.addresses("jetson1")) & set(lab.addresses("jetson1"))
    assert len({ssh(each, "jetson1", "cat /etc/machine-id") for each in (lab, other)}) == 2
    other.cut("jetson1")
    other.close()
    assert ssh(lab, "jetson1", "hostname") == "jetson1"
    assert "docker0" in lab.counters("localhost")


def test_interrupts_work_on_hosts_though_they_are_ignored_here(make_lab: MakeLab) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lab = make_lab("jetson1")
        texts = [
            ssh(lab, "jetson1", "cat /proc/self/status"),
            out(lab, "jetson1", "cat", "/proc/self/status"),
        ]
    finally:
        signal.signal(signal.SIGINT, before)
    ignored = [line.split()[1] for text in texts for line in text.splitlines() if line.startswith("SigIgn")]
    assert [int(mask, 16) & 1 << (signal.SIGINT - 1) for mask in ignored] == [0, 0]


@pytest.mark.parametrize("names", [["a", "a"], ["localhost"], ["switch"], ["no_good"]])
def test_bad_names_are_refused(names: List[str]) -> None:
    with pytest.raises(ValueError, match="host names"):
        Lab(*names)
