"""A host of ARM of 32 bits, alone and in one job with hosts of 64 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aarch64.jobs import finished
from tests.hosts.netlab import Lab

pytestmark = pytest.mark.timeout(300)

PYTHON = "/opt/numpy1/bin/python"


def test_all_collectives_give_the_same_bits_as_on_64_bits(lab: Lab, project: Path, pi: str) -> None:
    """Ranks of x86-64, aarch64 and armhf. Debian has no bfloat16 for NumPy on armhf."""
    hosts = ("-H", f"localhost,jetson2,{pi}", "--python", "jetson2=/opt/numpy2/bin/python")
    digests = project.parent / "digests.json"
    job = finished(lab, project, *hosts, "--python", f"{pi}={PYTHON}", "bits.py", digests)
    assert " results, 0 differ" in job.output and "is armv7l 1" in job.output, job.output


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_two_ranks_of_one_host(lab: Lab, project: Path, pi: str, transport: str) -> None:
    job = finished(lab, project, "-H", f"{pi}:2", "--python", PYTHON, "--transport", transport, "one_host.py")
    assert job.output.count("done on armv7l") == 2, job.output
