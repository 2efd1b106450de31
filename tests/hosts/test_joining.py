"""Machines that join with a code: one whose firewall lets nothing in, one that discovery finds; no ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.hosts.job import ROOT, Job, job_processes
from tests.hosts.netlab import Lab, wait_for
from tests.hosts.test_doors import LINE, MEMBER, logins

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


def join(lab: Lab, host: str, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    argv = [sys.executable, "-m", "ringrun", "join", "--yes", *words]
    return lab.popen(
        host, argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


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
