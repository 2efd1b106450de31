"""One job with ranks of x86-64 and of aarch64, with NumPy 1 and 2, over SSH: the same numbers everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.aarch64.jobs import NUMPYS, THREE, finished
from tests.hosts.netlab import Lab

pytestmark = pytest.mark.timeout(300)


def bits(lab: Lab, project: Path, *arguments: Any) -> Dict[str, str]:
    """Run bits.py; the digests of its results, which are the same on all ranks."""
    digests = project.parent / "digests.json"
    job = finished(lab, project, *arguments, "bits.py", digests)
    assert " results, 0 differ" in job.output, job.output
    found: Dict[str, str] = json.loads(digests.read_text())
    return found


@pytest.mark.parametrize("algorithm", ["direct", "doubling", "ring"])
def test_all_collectives_give_the_same_bits(lab: Lab, project: Path, algorithm: str) -> None:
    """On all ranks of both architectures, and in a job on x86-64 alone.

    In Adasum the processor decides in which order a dot product is added up.
    """
    options = ("-x", f"ALGORITHM={algorithm}")
    both = bits(lab, project, "-H", THREE, *NUMPYS, *options)
    one = bits(lab, project, "-H", "localhost:3", "--transport", "tcp", *options)
    differ = [case for case in one if both[case] != one[case]]
    assert both.keys() == one.keys()
    assert [case for case in differ if "adasum" not in case] == []


def test_an_encrypted_job(lab: Lab, project: Path) -> None:
    """TLS between both architectures, with the certificate that ringrun makes on x86-64."""
    job = finished(lab, project, "-H", THREE, *NUMPYS, "--encrypt", "one_host.py")
    assert job.output.count("done on aarch64") == 2 and "done on x86_64" in job.output, job.output
