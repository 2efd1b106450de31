"""The examples of ``torch.distributed``: the same numbers on any number of processes, under each launcher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List

import pytest

from tests.support.programs import run_python

pytest.importorskip("torch")

pytestmark = pytest.mark.release

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def ringrun(ranks: int) -> List[str]:
    return ["-m", "ringrun", "-np", str(ranks)]


def losses_in(output: str) -> Dict[int, float]:
    """The loss after each step that the output names."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", output)}


@pytest.mark.parametrize(("launcher", "ranks"), [([], 1), (ringrun(2), 2), (TORCHRUN, 2)])
def test_ddp_learns(launcher: List[str], ranks: int) -> None:
    pytest.importorskip("sklearn")
    output = run_python(*launcher, "examples/torch_ddp.py", "--epochs", "4")
    digests = re.findall(r"rank \d+: weights have digest ([0-9a-f]{16})", output, re.MULTILINE)
    assert len(digests) == ranks and len(set(digests)) == 1
    (reached,) = re.findall(r"bit-identical; final accuracy ([\d.]+)$", output, re.MULTILINE)
    assert float(reached) > 0.9


def test_the_benchmark_runs() -> None:
    output = run_python(*ringrun(2), "benchmarks/ddp.py", "--quick")
    assert len(re.findall(r"Gloo / ringcomm(?:-tcp)? [\d.]+$", output, re.MULTILINE)) == 8


def test_a_pipeline_learns_the_same_however_it_is_divided() -> None:
    small = ["examples/torch_pipeline.py", "--steps", "20", "--layers", "3", "--width", "32"]
    alone = losses_in(run_python(*small))
    assert sorted(alone) == [20] and alone[20] < 4.0
    for launcher, schedule in ((ringrun(3), "1f1b"), (TORCHRUN, "gpipe")):
        output = run_python(*launcher, *small, "--schedule", schedule)
        assert losses_in(output) == pytest.approx(alone, rel=1e-3)
    counts = re.findall(r"stage \d of 2: layers (\d) to (\d), (\d+) parameters", output)
    assert sorted(counts)[0][:2] == ("0", "0") and sorted(counts)[1][:2] == ("1", "2")


def test_text_is_generated_by_divided_layers() -> None:
    small = ["examples/torch_generate.py", "--steps", "20", "--context", "40", "--width", "48"]
    alone, output = run_python(*small), run_python(*ringrun(2), *small)
    assert losses_in(output) == pytest.approx(losses_in(alone), rel=1e-3)
    assert re.search(r"36 characters, the same on all 2 process\(es\); [\d.]+ ms per character", output)
    (mine, whole), _ = re.findall(r"has (\d+) of (\d+) parameters", output)
    assert int(mine) < 0.65 * int(whole)


def test_a_killed_training_goes_on_with_fewer_processes(tmp_path: Path) -> None:
    small = ["examples/torch_fsdp.py", "--steps", "30", "--every", "10", "--layers", "2", "--width", "32"]
    alone = losses_in(run_python(*small, "--folder", str(tmp_path / "alone")))
    assert sorted(alone) == [10, 20, 30]
    small += ["--folder", str(tmp_path / "killed")]
    output = run_python(*ringrun(3), *small, "--kill-at", "25", code=137)
    assert "rank 2 on localhost failed first: killed by SIGKILL" in output
    assert losses_in(output) == pytest.approx({step: alone[step] for step in (10, 20)}, rel=1e-3)
    output = run_python(*ringrun(2), *small)
    assert "goes on after step 20 with 2 process(es)" in output
    assert losses_in(output) == pytest.approx({30: alone[30]}, rel=1e-3)
