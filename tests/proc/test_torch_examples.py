"""The examples for ringcomm.torch, run with the commands in their first lines, on one to three ranks."""

from __future__ import annotations

import gzip
import importlib.util
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.proc.test_examples import together
from tests.support.programs import run_python

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


def output(ranks: int, example: str, *options: str) -> str:
    """Return what an example prints; one rank is started without ringrun."""
    if ranks == 1:
        return run_python(f"examples/{example}.py", *options)
    return together(ranks, example, *options)


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


@pytest.mark.release
@pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum"])
def test_options_of_the_digits(option: str, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    text = output(2, "torch_mnist", "--epochs", "2", option, "--checkpoint", str(saved))
    assert len(set(re.findall(r"weights have digest ([0-9a-f]{16})", text))) == 1
    assert saved.stat().st_size > 1000


@pytest.mark.release
def test_mnists_own_files(tmp_path: Path) -> None:
    """Made-up ones in the same format, packed and not."""
    chance = np.random.default_rng(1)
    for part, count in (("train", 60), ("t10k", 20)):
        images = chance.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = chance.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">BBBB3i", 0, 0, 8, 3, *images.shape)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        packed = gzip.compress(struct.pack(">BBBBi", 0, 0, 8, 1, count) + labels.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)
    assert "have reached" in output(1, "torch_mnist", "--epochs", "1", "--data", str(tmp_path))
