"""Jobs over three hosts: the right wires, the same bits, nothing left behind, and errors that help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import numpy as np
import psutil
import pytest

from tests.hosts import job as jobs
from tests.hosts.job import EXAMPLES, Job, ringrun
from tests.hosts.netlab import Lab, wait_for

PROGRAMS = Path(__file__).parent / "programs"
REDUCE, MEET = PROGRAMS / "reduce.py", PROGRAMS / "meet.py"
THREE = "localhost,jetson1,jetson2"
HOUSEKEEPING_BYTES = 20_000
"""What ARP, IPv6 neighbours and multicast leave on an interface that carries nothing else, at most."""
PROBING_BYTES = 4_000_000
"""What finding out that an interface is slow may cost, all hosts together."""
END_S = 5.0


def digests(job: Job) -> set[str]:
    return set(job.values(r"digest ([0-9a-f]+)"))


def all_counters(lab: Lab) -> dict[str, Any]:
    return {host: lab.counters(host) for host in ("localhost", *(each.name for each in lab.hosts))}


def check_wires(lab: Lab, before: dict[str, Any], at_least: int) -> None:
    """Collective traffic went over the fast interface, and none over the others."""
    after = all_counters(lab)
    for host in (each.name for each in lab.hosts):
        fast = jobs.traffic(before[host], after[host], {lab.iface(host)})
        slow = (
            jobs.traffic(before[host], after[host], {lab.iface(host, "wlan")})
            if "wlan0" in before[host]
            else 0
        )
        decoy = jobs.traffic(before[host], after[host], {"docker0"})
        assert fast > at_least, f"{host}: only {fast} bytes on its fast interface"
        assert slow < PROBING_BYTES, f"{host}: {slow} bytes on its slow interface"
        assert decoy < HOUSEKEEPING_BYTES, f"{host}: {decoy} bytes on docker0"


@pytest.mark.timeout(300)
@pytest.mark.smoke
def test_the_headline_command_trains_on_three_hosts(lab: Lab) -> None:
    pytest.importorskip("torch")
    before = all_counters(lab)
    # The three hosts share this machine's cores, and none counts the others' threads.
    one_thread = ["-x", "OMP_NUM_THREADS=1"]
    job = ringrun(lab, "-np", 3, "-H", THREE, *one_thread, EXAMPLES / "torch_mnist.py", timeout_s=240)
    assert job.process.returncode == 0, job.output
    assert len(job.values(r"^\[(localhost:0|jetson1:1|jetson2:2)\].*digest [0-9a-f]+")) == 3, job.output
    assert len(digests(job)) == 1, job.output
    check_wires(lab, before, at_least=1_000_000)


def test_ipv6_only(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("jetson1", "jetson2", ipv6_only=True)
    before = all_counters(lab)
    job = ringrun(lab, "-H", THREE, "--verbose", REDUCE)
    assert job.process.returncode == 0, job.output
    assert len(digests(job)) == 1
    check_wires(lab, before, at_least=10_000_000)


def test_hostfile_with_slots_comments_and_several_ranks_per_host(lab: Lab, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# the desk\nlocalhost slots=1\n\njetson1 slots=2   # two of them\njetson2 slots=2\n")
    job = ringrun(lab, "--hostfile", hostfile, REDUCE, "--repeat", 3)
    assert job.process.returncode == 0, job.output
    assert sorted(job.values(r"^\[(\S+:\d)\] rank \d digest")) == [
        "jetson1:1", "jetson1:2", "jetson2:3", "jetson2:4", "localhost:0",
    ]  # fmt: skip
    assert len(digests(job)) == 1


@pytest.mark.release
def test_iface_chooses_the_slow_one_when_told_to(lab: Lab) -> None:
    before = all_counters(lab)
    options = ["--iface", "10.98.0.0/16,!docker*"]
    job = ringrun(lab, "-H", THREE, *options, REDUCE, "--repeat", 1, "--items", 100_000)
    assert job.process.returncode == 0, job.output
    after = all_counters(lab)
    assert jobs.traffic(before["jetson1"], after["jetson1"], {"wlan0"}) > 400_000


@pytest.fixture
def endless(lab: Lab) -> Iterator[Callable[[str], Job]]:
    """Starts a job that would run for minutes; returns at the moment when it is well under way."""
    with ExitStack() as stack:

        def start(marker: str) -> Job:
            options = ["--repeat", 100_000, "--items", 10_000, "--marker", marker]
            job = stack.enter_context(Job(lab, "-H", THREE, "--verbose", REDUCE, *options))
            job.wait_for_line("is running")
            return job

        yield start


def check_gone(lab: Lab, marker: str) -> None:
    """Everything with the marker in its command line ends, everywhere, in time."""
    wait_for(
        lambda: not jobs.job_processes(lab, marker), END_S, f"the end of {jobs.job_processes(lab, marker)}"
    )
    for host in lab.hosts:
        wait_for(lambda name=host.name: not lab.processes(name), END_S, f"an idle {host.name}")


def test_nothing_survives_the_launcher(lab: Lab, endless: Callable[[str], Job]) -> None:
    job = endless("launcher-dies")
    os.kill(job.process.pid, signal.SIGKILL)
    check_gone(lab, "launcher-dies")
    job.finish()


def test_nothing_survives_an_ssh_client(lab: Lab, endless: Callable[[str], Job]) -> None:
    job = endless("ssh-dies")
    clients = [
        child
        for child in psutil.Process(job.process.pid).children(recursive=True)
        if "ssh" in child.name() and "jetson1" in child.cmdline()
    ]
    assert clients, "there is no ssh client to kill"
    for client in clients:
        client.kill()
    assert job.finish(timeout_s=2 * END_S) != 0
    check_gone(lab, "ssh-dies")
    assert "jetson1" in job.output.split("╭")[-1], job.output


@pytest.mark.smoke
@pytest.mark.parametrize("host, rank", [("localhost", 0), ("jetson2", 2)])
def test_a_killed_rank_ends_the_job_and_is_named(
    lab: Lab, endless: Callable[[str], Job], host: str, rank: int
) -> None:
    marker = f"rank-dies-{rank}"
    job = endless(marker)
    own = [pid for pid, line in lab.processes(host) if marker in line and "-m ringrun" not in line]
    os.kill(own[0], signal.SIGKILL)
    assert job.finish(timeout_s=2 * END_S) == 128 + signal.SIGKILL
    check_gone(lab, marker)
    box = job.output.split("╭")[-1]
    assert f"rank {rank} on {host}" in box and "SIGKILL" in box, job.output
    first, second = sorted({0, 1, 2} - {rank})
    assert f"rank {rank} ({host}) was lost" in box and f"Ranks {first}, {second} stopped because of it" in box
    assert "PeerLostError" not in job.output, "their tracebacks name what the box says"


def test_ctrl_c_ends_it_everywhere(lab: Lab, endless: Callable[[str], Job]) -> None:
    job = endless("ctrl-c")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish(timeout_s=END_S) == 130
    check_gone(lab, "ctrl-c")


REFUSALS = {
    "unknown host": (["-H", "localhost,nosuchhost"], r"nosuchhost.*(resolve|unknown|not known)"),
    "host key not accepted": (["-H", "localhost,unknownkey"], r"unknownkey.*host key"),
    "not let in": (["-H", "localhost,badkey"], r"badkey.*[Pp]ermission denied"),
    "no Python there": (
        ["-H", "localhost,jetson1", "--python", "jetson1=/no/such/python"],
        r"/no/such/python.*jetson1|jetson1.*/no/such/python",
    ),
    "no directory there": (["-H", "localhost,jetson1", "--cwd", "jetson1=/no/such/dir"], r"/no/such/dir"),
}


@pytest.mark.parametrize("options, words", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_start_is_explained(lab: Lab, options: list[str], words: str) -> None:
    job = ringrun(lab, *options, REDUCE, timeout_s=30)
    assert job.process.returncode not in (0, None)
    assert "Traceback" not in job.output, job.output
    assert re.search(words, job.output.replace("\n", " ")), job.output
    check_gone(lab, str(REDUCE))


def test_hosts_that_cannot_reach_each_other(lab: Lab) -> None:
    lab.cut("jetson1", ["jetson2"])
    job = ringrun(lab, "-H", THREE, "--start-timeout", 10, REDUCE, timeout_s=40)
    assert job.process.returncode != 0
    flat = job.output.replace("\n", " ")
    assert re.search(r"jetson1 and jetson2 cannot reach each other", flat), job.output
    assert re.search(r"10\.99\.\d+\.12 \(eth0\): no answer", flat), job.output


@pytest.mark.parametrize(
    "hosts", ["localhost,jetson1:2,jetson2", "jetson1:2,localhost,jetson2:2", "jetson2,jetson1", "jetson1:2"]
)
def test_what_ranks_are_told_is_true_and_they_can_meet(lab: Lab, hosts: str) -> None:
    job = ringrun(lab, "--horovod", "-H", hosts, MEET)
    assert job.process.returncode == 0, job.output
    size = hosts.count(",") + 1 + hosts.count(":2")
    assert job.values(r"^\[\S+:0\] met (.*)") == [" ".join(str(rank) for rank in range(1, size))]


def bytes_sent(lab: Lab, host: str, *arguments: Any) -> int:
    """Return what a host's fast interface sends during a whole job, measuring the links included."""
    before = lab.counters(host)[lab.iface(host)][1]
    job = ringrun(lab, *arguments, timeout_s=120)
    assert job.process.returncode == 0, job.output
    assert len(digests(job)) == 1, job.output
    return lab.counters(host)[lab.iface(host)][1] - before


def test_a_slow_link_gets_a_small_share(make_lab: Callable[..., Lab]) -> None:
    """With equal chunks, a rank sends 4/3 of 12 times 4 MB; one that owns nothing sends that once."""
    lab = make_lab("jetson1", "jetson2", "jetson3", no_wlan=True, docker=False)
    for host, rate in (("jetson1", "100mbit"), ("jetson2", "1gbit"), ("jetson3", "1gbit")):
        lab.shape(host, "eth", rate)
    sent = bytes_sent(lab, "jetson1", "-H", "jetson1,jetson2,jetson3", REDUCE, "--repeat", 12)
    assert 48_000_000 < sent < 58_000_000


def test_ranks_of_a_host_add_up_before_they_use_the_wire(lab: Lab) -> None:
    """Two hosts: each sends 12 times 4 MB once, not twice, although it has two ranks."""
    for host in ("jetson1", "jetson2"):
        lab.shape(host, "eth", "500mbit")
    sent = bytes_sent(lab, "jetson1", "-H", "jetson1:2,jetson2:2", REDUCE, "--repeat", 12)
    assert 48_000_000 < sent < 60_000_000


OPTIONS = ["--repeat", 3, "--items", 300_000]
SECRETS = {
    # Some numbers of jetson1's first contribution, as they lie in memory.
    "gradients": (np.arange(1000, 1008, dtype=np.float32) * 2).tobytes().hex(),
    "control messages": b'"hostname"'.hex(),
    "a handshake": b"ringcomm".hex(),
}


def captured(lab: Lab, *options: Any) -> Dict[str, Any]:
    """Run a job; what a listener receives at jetson1's interfaces meanwhile."""
    sniffer = lab.popen(
        "jetson1",
        [sys.executable, str(PROGRAMS / "sniff.py"), *SECRETS.values()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert sniffer.stdout is not None and sniffer.stdout.readline() == "listening\n"
        job = ringrun(lab, "-H", THREE, *options, REDUCE, *OPTIONS)
        assert job.process.returncode == 0, job.output
        assert len(digests(job)) == 1, job.output
        output, _ = sniffer.communicate("", timeout=30)
    finally:
        sniffer.kill()
        sniffer.communicate()
    found: Dict[str, Any] = json.loads(output)
    assert found["bytes"] > 300_000
    return {name: found["found"][word] for name, word in SECRETS.items()}


@pytest.mark.hosts
def test_a_listener_on_the_wire_learns_nothing(lab: Lab) -> None:
    plain = captured(lab)
    assert all(plain.values()), f"the listener does not receive all: {plain}"
    assert captured(lab, "--encrypt") == dict.fromkeys(SECRETS, 0)


STUCK = Path(__file__).parent / "programs" / "stuck.py"


def test_waiting_ranks_on_three_hosts(lab: Lab, tmp_path: Path) -> None:
    with Job(lab, "-np", 3, "-H", THREE, "--diagnose-dir", tmp_path, STUCK) as job:
        job.wait_for_line("rank 2 loads")
        time.sleep(0.5)  # until the others have come to the call
        os.kill(job.process.pid, signal.SIGUSR1)
        job.wait_for_line("ringrun: Ranks 0, 1 wait in allreduce `conv2`")
        job.wait_for_line(r"ringrun: Rank 2 \(jetson2\) is at op .*; its main thread is in load \(stuck.py:")
        job.wait_for_line("ringrun: Ranks 0, 1 wait for rank 2.")
        job.wait_for_line("ringrun diagnose")
        contents = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
        assert sorted(contents) == ["flight.0.json", "flight.1.json", "flight.2.json"]
        assert [content["host"] for _, content in sorted(contents.items())] == THREE.split(",")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM


def test_a_rank_that_is_stopped_on_another_host(lab: Lab, tmp_path: Path) -> None:
    with Job(
        lab, "-np", 2, "-H", "localhost,jetson1", "--diagnose-dir", tmp_path, "--dead-after", 2, STUCK
    ) as job:
        job.wait_for_line("rank 1 loads")
        pid = next(pid for pid, line in lab.processes("jetson1") if line.endswith(f"{STUCK}"))
        os.kill(pid, signal.SIGSTOP)
        assert job.finish() != 0
    assert "Rank 1 (jetson1) did not answer: its process is stopped" in job.output
    assert "Rank 0 waits for rank 1." in job.output


GROUP_PROBING_BYTES = 8_000_000
"""What finding out that an interface is slow may cost: for the job's links, and again for the group's."""


@pytest.mark.timeout(300)
def test_ddp_trains_on_three_hosts(lab: Lab) -> None:
    pytest.importorskip("torch")
    before = {host.name: lab.counters(host.name) for host in lab.hosts}
    options = ["-x", "OMP_NUM_THREADS=1", EXAMPLES / "torch_ddp.py", "--epochs", "3"]
    job = ringrun(lab, "-np", 3, "-H", THREE, *options, timeout_s=240)
    assert job.process.returncode == 0, job.output
    assert len(job.values(r"^\[(localhost:0|jetson1:1|jetson2:2)\].*digest [0-9a-f]+")) == 3, job.output
    assert len(set(job.values(r"digest ([0-9a-f]+)"))) == 1, job.output
    for host in lab.hosts:
        after = lab.counters(host.name)
        fast = jobs.traffic(before[host.name], after, {lab.iface(host.name)})
        slow = jobs.traffic(before[host.name], after, {lab.iface(host.name, "wlan"), "docker0"})
        assert fast > 1_000_000 and slow < GROUP_PROBING_BYTES, (host.name, fast, slow)
