"""What ranks on other hosts are doing comes to the launcher only."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.hosts.job import Job
from tests.hosts.netlab import Lab

STUCK = Path(__file__).parent / "programs" / "stuck.py"
THREE = "localhost,jetson1,jetson2"


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
