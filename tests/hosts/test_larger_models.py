"""The examples for models that are divided among processes, on three hosts with slow links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from tests.hosts.enduring import cut_stage, endure, kill_stage, stage_program
from tests.hosts.job import EXAMPLES, ringrun
from tests.hosts.netlab import Lab, wait_for

pytestmark = [pytest.mark.release, pytest.mark.timeout(400)]

THREE = "localhost,jetson1,jetson2"
TWO = "localhost,jetson1"
GROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_BYTES = 650_000_000
"""Of a host. PyTorch takes 200 MB, four layers with gradients and AdamW 200 MB more, all twelve 600 MB."""
SAFE_S = 20.0
"""A limit for what takes about a tenth of a second, or ``--dead-after``."""
LARGE = "--width 512 --layers 12 --context 16 --batch-size 8 --steps 4"


@pytest.fixture(autouse=True)
def _with_torch() -> None:
    pytest.importorskip("torch")


@pytest.fixture
def limited(lab: Lab) -> Iterator[str]:
    """The start of a command by which a rank joins a control group of its own, with this much memory."""
    mounting = (
        f"[ -d {GROUPS} ] || {{ mount -t tmpfs none {GROUPS.parent} && mkdir {GROUPS} && "
        f"mount -t cgroup -o memory memory {GROUPS}; }}"
    )
    groups = [GROUPS / f"ringcomm-test-{os.getpid()}-{rank}" for rank in range(3)]
    try:
        for group in groups:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        for host in lab.hosts:
            lab.run(host.name, ["sh", "-c", mounting])
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"no control group for memory can be made here: {problem}")
    yield f"echo 0 > {GROUPS}/ringcomm-test-{os.getpid()}-$RANK/cgroup.procs"
    for group in groups:
        wait_for(lambda group=group: not (group / "cgroup.procs").read_text().strip(), 10, "their end")
        group.rmdir()


def losses_in(output: str) -> Dict[int, float]:
    """The loss after each step that the output names."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", output)}


def run(lab: Lab, hosts: str, *command: Any, code: int = 0) -> str:
    """A job with a process per host; its output."""
    size = len(hosts.split(","))
    job = ringrun(lab, "-np", size, "-H", hosts, "-x", "OMP_NUM_THREADS=1", *command, timeout_s=180)
    assert job.process.returncode == code, job.output
    return job.output


def slow_links(lab: Lab, rate: str) -> None:
    for host in ("localhost", "jetson1", "jetson2"):
        lab.shape(host, "eth", rate)


@pytest.mark.parametrize("rate, schedule", [("100mbit", "1f1b"), ("1gbit", "gpipe")])
def test_a_pipeline_on_three_hosts_learns_as_one_process_does(lab: Lab, rate: str, schedule: str) -> None:
    small = [EXAMPLES / "torch_pipeline.py", "--steps", "20", "--layers", "3", "--width", "32"]
    alone = losses_in(run(lab, "localhost", *small))
    slow_links(lab, rate)
    output = run(lab, THREE, *small, "--schedule", schedule)
    assert sorted(alone) == [20] and losses_in(output) == pytest.approx(alone, rel=1e-3)
    assert sorted(set(re.findall(r"stage (\d) of 3", output))) == ["0", "1", "2"]


def test_text_is_generated_on_three_hosts(lab: Lab) -> None:
    small = [EXAMPLES / "torch_generate.py", "--steps", "20", "--context", "40", "--width", "48"]
    alone = run(lab, "localhost", *small)
    slow_links(lab, "100mbit")
    output = run(lab, THREE, *small)
    assert losses_in(output) == pytest.approx(losses_in(alone), rel=1e-3)
    assert re.search(r"36 characters, the same on all 3 process\(es\)", output)


def test_sharded_training_goes_on_with_two_hosts_after_one_was_lost(lab: Lab, tmp_path: Path) -> None:
    small = [EXAMPLES / "torch_fsdp.py", "--steps", "30", "--every", "10", "--layers", "2", "--width", "32"]
    alone = losses_in(run(lab, "localhost", *small, "--folder", tmp_path / "alone"))
    slow_links(lab, "100mbit")
    small += ["--folder", tmp_path / "killed"]
    output = run(lab, THREE, *small, "--kill-at", "25", code=137)
    assert "rank 2 on jetson2 failed first: killed by SIGKILL" in output
    assert losses_in(output) == pytest.approx({step: alone[step] for step in (10, 20)}, rel=1e-3)
    output = run(lab, TWO, *small)
    assert "goes on after step 20 with 2 process(es)" in output
    assert losses_in(output) == pytest.approx({30: alone[30]}, rel=1e-3)


def test_a_pipeline_trains_what_one_host_has_no_memory_for(lab: Lab, limited: str) -> None:
    program = f"exec {sys.executable} {EXAMPLES / 'torch_pipeline.py'} {LARGE}"
    alone = losses_in(run(lab, "localhost", "sh", "-c", program))
    slow_links(lab, "100mbit")
    assert "killed by SIGKILL" in run(lab, "localhost", "sh", "-c", f"{limited} && {program}", code=137)
    output = run(lab, THREE, "sh", "-c", f"{limited} && {program}")
    assert sorted(alone) == [4] and losses_in(output) == pytest.approx(alone, rel=1e-3)


def test_a_killed_stage_is_named_by_all_ranks(lab: Lab, tmp_path: Path) -> None:
    slow_links(lab, "100mbit")
    seen = endure(lab, tmp_path, stage_program(tmp_path), kill_stage, dead_after_s=30.0)
    assert "rank 1 on jetson1 failed first: killed by SIGKILL" in seen.output, seen.output
    assert "rank 1 (jetson1) was lost" in seen.output, seen.output
    assert "Ranks 0, 2 stopped because of it" in seen.output, seen.output
    assert {rank: error["rank"] for rank, error in seen.errors.items()} == {0: 1, 2: 1}, seen.errors
    print("named " + ", ".join(f"by rank {rank} after {took:.2f} s" for rank, took in seen.took_s().items()))
    assert max(seen.took_s().values()) < SAFE_S and seen.left == {}


def test_a_stage_without_a_link_is_named_by_all_ranks(lab: Lab, tmp_path: Path) -> None:
    """Nothing is received that says so, and ``--dead-after`` decides when. The stage itself ends, too."""
    slow_links(lab, "100mbit")
    seen = endure(lab, tmp_path, stage_program(tmp_path), cut_stage, dead_after_s=2.0)
    assert {rank: error["rank"] for rank, error in seen.errors.items()} == {0: 1, 1: 1, 2: 1}, seen.errors
    print("named " + ", ".join(f"by rank {rank} after {took:.2f} s" for rank, took in seen.took_s().items()))
    assert max(seen.took_s().values()) < SAFE_S and seen.left == {}
