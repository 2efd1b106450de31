"""``examples/torch_ddp.py`` under every launcher, and the benchmark as a program that works."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import run_python

pytest.importorskip("torch")

pytestmark = pytest.mark.release
pytest.importorskip("sklearn")

LAUNCHERS = {
    "alone": ([], 1),
    "ringrun": (["-m", "ringrun", "-np", "2"], 2),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 2),
}


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_it_learns(launcher):
    prefix, ranks = LAUNCHERS[launcher]
    output = run_python(*prefix, "examples/torch_ddp.py", "--epochs", "4")
    digests = re.findall(r"rank \d+: weights have digest ([0-9a-f]{16})", output, re.MULTILINE)
    assert len(digests) == ranks and len(set(digests)) == 1
    (reached,) = re.findall(r"bit-identical; final accuracy ([\d.]+)$", output, re.MULTILINE)
    assert float(reached) > 0.9


def test_the_benchmark_runs():
    output = run_python("-m", "ringrun", "-np", "2", "benchmarks/ddp.py", "--quick")
    assert len(re.findall(r"Gloo / ringcomm(?:-tcp)? [\d.]+$", output, re.MULTILINE)) == 8
