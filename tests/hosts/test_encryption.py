"""`--encrypt` over three hosts: the same bits, and nothing of them for a listener on the wire."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Dict

import numpy as np
import pytest

from tests.hosts.job import ringrun
from tests.hosts.netlab import Lab
from tests.hosts.test_jobs import PROGRAMS, REDUCE, THREE, digests

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
