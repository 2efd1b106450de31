"""The Keras example on three hosts: where Keras is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.hosts.job import EXAMPLES, ringrun
from tests.hosts.netlab import Lab


@pytest.mark.timeout(300)
@pytest.mark.skipif(not (find_spec("keras") and find_spec("tensorflow")), reason="needs Keras on TensorFlow")
def test_the_report_from_jetsons_works_with_one_command(lab: Lab) -> None:
    """Three hosts, no interface named, no slots, and training until an accuracy is reached."""
    quiet = ["-x", "OMP_NUM_THREADS=1", "-x", "TF_CPP_MIN_LOG_LEVEL=3"]
    program = [EXAMPLES / "keras_mnist.py", "--target", 0.9]
    job = ringrun(lab, "-np", 3, "-H", "localhost,jetson1,jetson2", *quiet, *program, timeout_s=240)
    assert job.process.returncode == 0, job.output
    epochs = len(job.values(r"rank 0 on \S+: (epoch)"))
    assert epochs > 0
    for rank, host in ((1, "jetson1"), (2, "jetson2")):
        assert len(job.values(rf"rank {rank} on {host}: (epoch)")) == epochs, job.output
    (reached,) = job.values(r"final validation accuracy ([\d.]+)")
    assert float(reached) >= 0.9
