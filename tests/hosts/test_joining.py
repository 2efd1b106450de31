"""Machines that join with a code: behind a firewall, found by discovery, behind routers with NAT and links of
40 ms and 20 Mbit/s; they sleep, and change their addresses; no ssh.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable, Iterator, List

import pytest

from tests.hosts import netlab_plan as plans
from tests.hosts import netlab_system as system
from tests.hosts.job import EXAMPLES, ROOT, Job, job_processes
from tests.hosts.netlab import LOCALHOST, Lab, wait_for
from tests.hosts.test_doors import LINE, MEMBER, logins
from tests.support.service import free_port

pytest.importorskip("spake2")
PROGRAM = ROOT / "tests/hosts/programs/slow_torch.py"
OUTSIDE = "203.0.113.9:443"
DELAY_MS, MBIT = 40, 20
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


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the launcher and each machine keep their keys: on all hosts the home is this machine's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "localhost"))
    return tmp_path


@pytest.fixture
def closed(lab: Lab) -> Iterator[str]:
    """jetson1, with the default of an office PC: nothing comes in, everything goes out."""
    lab.run("jetson1", ["nft", "-f", "-"], input=FIREWALL)
    yield "jetson1"
    lab.run("jetson1", ["nft", "delete table inet office"])


def join(lab: Lab, host: str, *words: str, network: str = "") -> subprocess.Popen[str]:
    """Join on a host, or with its name in another network namespace."""
    home = Path(os.environ["XDG_CONFIG_HOME"]).parent / host
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "XDG_CONFIG_HOME": str(home)}
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
def cable(router: str, inside: str, is_slow: bool) -> Iterator[None]:
    """Connect `home` of a router with `eth0` of a machine behind it."""
    if not is_slow:
        system.ip(router, "link", "add", "home", "type", "veth", "peer", "name", "eth0", "netns", inside)
        try:
            yield
        finally:
            system.ip(router, "link", "del", "home")
        return
    argv = ["tests.support.delay_line", router, "home", inside, "eth0", str(DELAY_MS), str(MBIT)]
    with subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE, text=True, cwd=ROOT) as line:
        try:
            assert line.stdout is not None and line.stdout.readline() == "ready\n"
            yield
        finally:
            line.kill()


@contextmanager
def behind_nat(lab: Lab, host: str, launcher: str, port: int, is_slow: bool = False) -> Iterator[str]:
    """Make a host a router, and yield the network namespace of a machine behind it: all have one address."""
    router = str(plans.netns_of(lab.number, host))
    inside = f"{router}-home"
    system.ip(None, "netns", "add", inside)
    rules = NAT.format(wan=lab.iface(host), launcher=launcher, port=port)
    try:
        with cable(router, inside, is_slow):
            yield from _routed(router, inside, rules)
    finally:
        system.ip(None, "netns", "del", inside)


def _routed(router: str, inside: str, rules: str) -> Iterator[str]:
    system.ip_batch(router, ["addr add 192.168.178.1/24 dev home", "link set home up"])
    system.ip_batch(inside, [
        "link set lo up", "addr add 192.168.178.20/24 dev eth0", "link set eth0 up",
        "route add default via 192.168.178.1",
    ])  # fmt: skip
    system.in_netns(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    system.in_netns(router, "nft", "-f", "-", stdin=rules)
    try:
        yield inside
    finally:
        system.in_netns(router, "nft", "delete table inet home")


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
        joined = [join(lab, host, OUTSIDE, found[1], network=inside) for host, inside in homes.items()]
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


def test_a_launcher_behind_a_router_is_reached_through_a_server(lab: Lab) -> None:
    """It keeps a connection open to a server that both reach, by ssh, which forwards a port of the server."""
    server, port, remote = lab.addresses("jetson2")[0], free_port(), 43117
    forward = f"{server}:{remote}:127.0.0.1:{port}"
    options = ["-o", "ExitOnForwardFailure=yes", "-v", "-N", "-R", forward, "jetson2"]
    with ExitStack() as stack:
        inside = stack.enter_context(behind_nat(lab, "jetson1", server, remote))
        tunnel = stack.enter_context(subprocess.Popen(
            [*lab.ssh_command.split(), "-o", "LogLevel=INFO", *options], stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
        stack.callback(tunnel.kill)
        assert tunnel.stderr is not None
        assert any("remote forward success" in line for line in tunnel.stderr)
        job = stack.enter_context(Job(lab, "-H", f"localhost,join:1@{port}", MEMBER))
        found = job.wait_for_line(r"ringrun join \S+ (\S+)")
        joined = join(lab, "jetson1", OUTSIDE, found[1], network=inside)
        assert job.finish() == 0, job.output
        said = joined.communicate(timeout=20)[0]
    assert joined.returncode == 0, said
    rows = {int(row[0]): row for row in LINE.findall(job.output)}
    assert {row[2] for row in rows.values()} == {"jetson1", os.uname().nodename}, job.output
    assert {row[5] for row in rows.values()} == {"3"}, job.output


def test_torch_distributed_trains_behind_two_nats(lab: Lab) -> None:
    """PyTorch's store and the links of its groups go through the launcher's one port, too."""
    pytest.importorskip("torch")
    launcher, port = lab.addresses(LOCALHOST)[0], free_port()
    with ExitStack() as stack:
        homes = {
            host: stack.enter_context(behind_nat(lab, host, launcher, port))
            for host in ("jetson1", "jetson2")
        }
        options = ["-x", "OMP_NUM_THREADS=1", "-H", f"join:2@{port}"]
        job = stack.enter_context(Job(lab, *options, EXAMPLES / "torch_ddp.py", "--epochs", "1"))
        found = job.wait_for_line(r"ringrun join \S+ (\S+)")
        joined = [join(lab, host, OUTSIDE, found[1], network=inside) for host, inside in homes.items()]
        assert job.finish(120) == 0, job.output
        said = [process.communicate(timeout=20)[0] for process in joined]
    assert [process.returncode for process in joined] == [0, 0], said
    digests = job.values(r"digest ([0-9a-f]+)")
    assert len(digests) == 2 and len(set(digests)) == 1, job.output


class Homes:
    """Two machines at home, behind slow links and NAT, which have joined a job here."""

    def __init__(self, lab: Lab, stack: ExitStack, folder: Path, *options: str) -> None:
        launcher, port = lab.addresses(LOCALHOST)[0], free_port()
        self.lab, self.go_on = lab, folder / "go-on"
        self.go_on.touch()
        inside = [
            stack.enter_context(behind_nat(lab, host, launcher, port, is_slow=True))
            for host in ("jetson1", "jetson2")
        ]
        self.job = stack.enter_context(Job(
            lab, "--verbose", "-x", f"GO_ON={self.go_on}", "-x", "STEPS=6", "-x", "OMP_NUM_THREADS=1",
            *options, "-H", f"localhost,join:2@{port}", PROGRAM,
        ))  # fmt: skip
        found = self.job.wait_for_line(r"ringrun join \S+ (\S+)")
        self.machines = [
            join(lab, host, OUTSIDE, found[1], network=network)
            for host, network in zip(("jetson1", "jetson2"), inside)
        ]
        self.job.wait_for_line(r"step 2 of 3 ranks", 60.0)

    def signal(self, host: str, number: int) -> None:
        """Send a signal to all processes of a machine."""
        for pid, line in self.lab.processes(host):
            if "python" in line:
                os.kill(pid, number)
        for machine in self.machines:  # nsenter stops when what it has started does
            machine.send_signal(signal.SIGCONT)

    def finish(self) -> List[str]:
        """Let the job end well; what the machines have said."""
        self.go_on.unlink()
        assert self.job.finish(120) == 0, self.job.output
        said = [machine.communicate(timeout=20)[0] for machine in self.machines]
        assert [machine.returncode for machine in self.machines] == [0, 0], said
        digests = self.job.values(r"(digest [0-9a-f]+ of 3 ranks)")
        assert len(digests) == 3 and len(set(digests)) == 1, self.job.output
        return said


@pytest.fixture
def homes(lab: Lab, tmp_path: Path) -> Iterator[Callable[..., Homes]]:
    pytest.importorskip("torch")
    with ExitStack() as stack:
        yield lambda *options: Homes(lab, stack, tmp_path, *options)


@pytest.mark.timeout(240)
@pytest.mark.release
def test_pytorch_trains_over_slow_links_while_a_machine_sleeps(homes: Callable[..., Homes]) -> None:
    """For less than --dead-after: by all its processes, then by its cable."""
    made = homes("--dead-after", "30", "-x", "STEPS=9")
    assert len(made.job.values(rf"<-> .* relayed over {os.uname().nodename}$")) == 3, made.job.output
    made.signal("jetson1", signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        made.job.process.wait(8)
    made.signal("jetson1", signal.SIGCONT)
    inside = f"{plans.netns_of(made.lab.number, 'jetson2')}-home"
    system.ip(inside, "link", "set", "eth0", "down")
    with pytest.raises(subprocess.TimeoutExpired):
        made.job.process.wait(8)
    system.ip_batch(inside, ["link set eth0 up", "route add default via 192.168.178.1"])
    made.finish()
    assert "lost" not in made.job.output
    assert made.job.values(r"With --compress auto they would choose (\w+): step"), made.job.output


@pytest.mark.timeout(240)
@pytest.mark.release
@pytest.mark.parametrize("change", ["sleeps", "gets another address"])
def test_a_machine_leaves_an_elastic_job_and_joins_again(homes: Callable[..., Homes], change: str) -> None:
    made = homes("--min-np", "2", "--dead-after", "5")
    router = str(plans.netns_of(made.lab.number, "jetson2"))
    iface, own = made.lab.iface("jetson2"), made.lab.addresses("jetson2", "eth")[0]
    other = own.rpartition(".")[0] + ".77"

    def move(here: str, there: str) -> None:
        system.ip_batch(router, [f"addr del {here}/24 dev {iface}", f"addr add {there}/24 dev {iface}"])

    if change == "sleeps":
        made.signal("jetson2", signal.SIGSTOP)
    else:
        move(own, other)
    try:
        made.job.wait_for_line(r"step \d+ of 2 ranks", 60.0)
        made.signal("jetson2", signal.SIGCONT)
        made.job.wait_for_line(r"jetson2 joined again: 3 ranks", 90.0)
        made.finish()
    finally:
        if change != "sleeps":
            move(other, own)
