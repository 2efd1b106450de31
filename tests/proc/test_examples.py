"""The examples, run as in the README: any number of ranks gives the result of one process."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import List, NamedTuple

import pytest

from tests.proc.test_ringrun_support import Launched
from tests.support.programs import ONE_THREAD, ROOT, SOURCES, run_python

LIMIT_S = 100.0
EXAMPLES = [
    pytest.param("numpy_digits", id="numpy"),
    pytest.param(
        "jax_digits",
        id="jax",
        marks=pytest.mark.skipif(not importlib.util.find_spec("optax"), reason="optax is not installed"),
    ),
]


class Training(NamedTuple):
    """What an example printed."""

    losses: List[float]
    digests: List[str]
    accuracy: float


def read(output: str) -> Training:
    (accuracy,) = re.findall(r"are bit-identical; final accuracy ([\d.]+)$", output, re.MULTILINE)
    return Training(
        [float(loss) for loss in re.findall(r"epoch +\d+  loss ([\d.]+)", output)],
        re.findall(r"rank \d+: weights have digest ([0-9a-f]{16})$", output, re.MULTILINE),
        float(accuracy),
    )


@functools.lru_cache(maxsize=None)
def alone(example: str, *options: str) -> Training:
    """``python examples/EXAMPLE.py``: one process, no launcher."""
    return read(run_python(f"examples/{example}.py", *options))


def together(ranks: int, example: str, *options: str) -> str:
    """``ringrun -np RANKS examples/EXAMPLE.py``; what the ranks print."""
    job = Launched("-np", str(ranks), f"examples/{example}.py", *options, cwd=ROOT, env=ONE_THREAD)
    assert job.finish(LIMIT_S) == 0, f"{job.out}\n{job.err}"
    return job.out


@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.release) for ranks in (1, 2)), 3])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.cases(2)
def test_any_number_of_ranks_learns_what_one_process_learns(example: str, ranks: int) -> None:
    one, many = alone(example), read(together(ranks, example))
    assert one.accuracy >= 0.95  # with 64 images per step: 3 ranks have uneven parts
    assert many.accuracy == pytest.approx(one.accuracy, abs=0.01)
    assert many.losses == pytest.approx(one.losses, abs=1e-3)
    assert len(many.digests) == ranks
    assert len(set(many.digests)) == 1


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.release
def test_a_rank_may_have_no_part_of_a_batch(example: str) -> None:
    options = ("--epochs", "1", "--batch-size", "718")  # the last of the three steps has one image
    one, many = alone(example, *options), read(together(3, example, *options))
    assert len(one.losses) == 1
    assert many.losses == pytest.approx(one.losses, abs=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("example", EXAMPLES)
def test_missing_scikit_learn_is_said_with_its_remedy(example: str, tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('not here', name='sklearn')\n")
    text = run_python(f"examples/{example}.py", code=1, PYTHONPATH=f"{tmp_path}:{SOURCES}")
    assert text.count("\n") == 1
    assert text.endswith(f"Install it: {sys.executable} -m pip install scikit-learn\n")


needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


def output(ranks: int, example: str, *options: str) -> str:
    """Return what an example prints; one rank is started without ringrun."""
    if ranks == 1:
        return run_python(f"examples/{example}.py", *options)
    return together(ranks, example, *options)


@needs_torch
@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 3])
def test_digits_are_learned(ranks: int) -> None:
    text = output(ranks, "torch_mnist")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    (reached,) = re.findall(rf"{ranks} process\(es\) have reached ([\d.]+)", text)
    assert float(reached) > 0.8
    digests = re.findall(r"weights have digest ([0-9a-f]{16})", text)
    assert len(digests) == ranks
    assert len(set(digests)) == 1


@needs_torch
@pytest.mark.release
@pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum"])
def test_options_of_the_digits(option: str, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    text = output(2, "torch_mnist", "--epochs", "2", option, "--checkpoint", str(saved))
    assert len(set(re.findall(r"weights have digest ([0-9a-f]{16})", text))) == 1
    assert saved.stat().st_size > 1000
