"""The script on the page about elastic jobs, while its ranks are killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from pathlib import Path
from typing import Dict

import pytest

from tests.proc.test_ringrun_support import ROOT, Launched
from tests.support.programs import run_python

EXAMPLE = ROOT / "examples" / "elastic_numpy.py"


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "elastic.md").read_text()
    (block,) = re.findall(r"```python\n(# elastic_numpy.py\n.*?)```", page, re.S)
    assert block == EXAMPLE.read_text()


def test_the_example_learns_the_same_although_its_ranks_are_killed(tmp_path: Path) -> None:
    """Ten times as many steps, so that there is time; two of three ranks are killed, rank 0 first."""
    script = tmp_path / "elastic_numpy.py"
    script.write_text(EXAMPLE.read_text().replace("STEPS, GLOBAL_BATCH = 300", "STEPS, GLOBAL_BATCH = 3000"))
    out = tmp_path / "out"
    job = Launched(
        "-np", "3", "--min-np", "2", "--max-np", "3", "--output-dir", str(out), str(script),
        env={"XDG_RUNTIME_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    for member, victim in ((0, 0), (3, 1)):
        wait_for(out / f"rank.{member}" / "stdout", "of 3 begins", job)
        os.kill(process_of(job, victim), signal.SIGKILL)
    assert job.finish(120.0) == 0, job.err
    assert "rank 0 (localhost) lost: killed by SIGKILL; going on with 2 ranks" in job.err
    assert job.err.count("killed by SIGKILL; going on") == 4, "two lines, and two in the box"
    errors = re.findall(r"rank \d: largest error of a weight (\S+)", job.out)
    assert len(errors) >= 2 and len(set(errors)) == 1 and float(errors[0]) < 1e-6


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_the_example_with_pytorch_goes_on_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    script, saved, out = str(ROOT / "examples" / "elastic_torch.py"), tmp_path / "model.pt", tmp_path / "out"
    job = Launched(
        "-np", "3", "--min-np", "2", "--max-np", "3", "--output-dir", str(out), script, "--epochs", "20",
        "--checkpoint", str(saved), env={"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(out / "rank.0" / "stdout", "epoch 1 is done", job)
    os.kill(process_of(job, 0), signal.SIGKILL)
    assert job.finish(100.0) == 0, job.err
    assert "rank 0 (localhost) lost: killed by SIGKILL; going on with 2 ranks" in job.err
    done = [int(epoch) for epoch in re.findall(r"epoch (\d+) is done", job.out)]
    assert sorted(set(done)) == list(range(1, 21)), job.out
    printed = run_python(script, "--epochs", "21", "--checkpoint", str(saved), OMP_NUM_THREADS="1")
    assert "continues after epoch 20" in printed and "epoch 21 is done" in printed
    (reached,) = re.findall(r"1 process\(es\) have reached ([\d.]+)", printed)
    assert float(reached) > 0.85


@pytest.mark.release
def test_the_losses_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """Fixed global batches in float64: one process alone, and ranks that are lost and that join."""
    program = str(ROOT / "tests" / "proc" / "programs" / "elastic_losses.py")
    expected = losses_of(run_python(program))
    assert len(expected) == 126 and expected[125] < expected[0] / 10
    job = Launched(
        "-np", "3", "--min-np", "2", "--max-np", "3", program,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1", "DIE": "0:20", "WAIT_AT": "70"},
    )  # fmt: skip
    assert job.finish(120.0) == 0, job.err
    assert {"with 2", "with 3"} <= set(re.findall(r"begins at [1-9]\d* (with \d)", job.out)), job.out
    assert job.err.count("killed by SIGKILL; going on with 2 ranks") == 2, "a line, and one in the box"
    reached = losses_of(job.out)
    assert reached.keys() == expected.keys()
    for step, loss in expected.items():
        assert abs(reached[step] - loss) <= 1e-12 * loss, f"step {step}"


def losses_of(output: str) -> Dict[int, float]:
    """The loss by step, which is the same wherever it was printed."""
    found: Dict[int, float] = {}
    for step, loss in re.findall(r"loss (\d+) (\S+)", output):
        assert found.setdefault(int(step), float.fromhex(loss)) == float.fromhex(loss), f"step {step}"
    return found


def wait_for(path: Path, text: str, job: Launched) -> None:
    """Wait until a file contains a text."""
    until = time.monotonic() + 100.0
    while not (path.exists() and text in path.read_text()):
        assert job.process.poll() is None and time.monotonic() < until, (job.finish(1.0), job.out, job.err)
        time.sleep(0.02)


def process_of(job: Launched, member: int) -> int:
    """The process id of a member of the job."""
    for pid in job.pids():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RINGCOMM_MEMBER=%d" % member in environ:
            return pid
    raise AssertionError(f"there is no member {member}")
