"""The backend for torch.distributed over three hosts: PyTorch's store included, nothing has to be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import job as jobs
from tests.hosts.job import EXAMPLES, ringrun
from tests.hosts.netlab import Lab

THREE = "localhost,jetson1,jetson2"
ROOT = Path(__file__).resolve().parents[2]
PROBING_BYTES = 8_000_000
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
        assert fast > 1_000_000 and slow < PROBING_BYTES, (host.name, fast, slow)
