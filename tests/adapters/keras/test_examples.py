"""The examples for Keras and TensorFlow, run with the commands in their docstrings."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path
from typing import Any, Union

import numpy as np
import pytest

from tests.support.programs import ROOT, run_python


def ringrun(ranks: int, example: Union[str, Path], *options: Any, **environment: str) -> str:
    """``ringrun -np RANKS examples/EXAMPLE``; what it printed."""
    program = ("-m", "ringrun", "-np", ranks, ROOT / "examples" / example, *options)
    return run_python(*program, TF_CPP_MIN_LOG_LEVEL="3", **environment)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["keras_train.py", "tensorflow_train.py"])
def test_the_scripts_in_the_documentation_run(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tensorflow.md").read_text()
    (script,) = re.findall(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)
    (tmp_path / name).write_text(script)
    output = ringrun(2, tmp_path / name)
    assert float(output.split()[-1]) < 1e-2, output


def accuracy(output: str) -> float:
    (found,) = re.findall(r"final validation accuracy ([\d.]+)", output)
    return float(found)


@pytest.mark.release
@pytest.mark.timeout(200)
def test_keras_reads_mnists_own_files(tmp_path: Path) -> None:
    """Digits in the format of MNIST, plain and compressed; and another backend than TensorFlow."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    grey = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    for part, rows, suffix in (("train", slice(0, 960), ""), ("t10k", slice(960, 1200), ".gz")):
        for kind, items in (("images-idx3", grey[rows]), ("labels-idx1", labels[rows].astype(np.uint8))):
            head = bytes([0, 0, 8, items.ndim]) + struct.pack(f">{items.ndim}I", *items.shape)
            data = head + items.tobytes()
            path = tmp_path / f"{part}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(data) if suffix else data)
    output = ringrun(
        2, "keras_mnist.py", "--mnist", tmp_path, "--epochs", 2, "--target", 0.5, KERAS_BACKEND="jax"
    )
    assert "on jax, 480 images each" in output
    assert accuracy(output) > 0.3


@pytest.mark.timeout(200)
def test_a_session_of_tensorflow_1_learns() -> None:
    assert accuracy(ringrun(2, Path(__file__).with_name("tf1_digits.py"))) > 0.9
