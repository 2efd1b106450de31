"""``ringrun --predict``: measures a program, prints the table, and ends it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.proc.test_ringrun_support import ringrun

PROGRAM = """
import sys
import numpy as np
import ringcomm as rc

rc.init()
kind, steps = sys.argv[1], int(sys.argv[2])
gradients = [np.ones(50_000, np.float32) for _ in range(3)] + [np.ones(7, np.float32)]
for step in range(steps):
    matrix = np.ones((300, 300)) @ np.ones((300, 300))
    if kind == "async":
        handles = [rc.allreduce_async_(g, name=f"g{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            handle.wait()
    else:
        for gradient in gradients:
            rc.allreduce_(gradient)
print(f"rank {rc.rank()} has made all steps")
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["async", "blocking"])
def test_a_table_and_a_figure(program, kind):
    flags = ["--predict", "--ranks", "2,64", "--link", "100mbit", "--batch", "8", "--figure", "figure.svg"]
    done = ringrun("-np", "2", *flags, "train.py", kind, "100000", cwd=program)
    assert done.process.returncode == 0, done.err
    assert "4 reductions of 0.6 MB together" in done.err
    assert "predicted for interfaces of 100mbit" in done.err
    assert "64" in done.err and "32 extra servers" in done.err
    assert "all steps" not in done.out
    ElementTree.parse(program / "figure.svg")


@pytest.mark.full
def test_a_program_that_ends_too_early(program):
    done = ringrun("-np", "2", "--predict", "train.py", "async", "4", cwd=program)
    assert done.process.returncode == 1
    assert done.err.count("No prediction: ") == 1
    assert "No prediction: the program ended after 16 reductions" in done.err
    assert done.out.count("all steps") == 2


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--predict", "No prediction: the program ended without one. It must call init() of ringcomm"),
        ("--advise", "No advice: the program ended without it. It must call init() of ringcomm"),
    ],
)
def test_a_program_without_ringcomm(tmp_path, flag, words):
    (tmp_path / "train.py").write_text("print('all steps')\n")
    done = ringrun("-np", "2", flag, "train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    assert done.err.count(words) == 1 and "Traceback" not in done.err
    assert done.out.count("all steps") == 2


def test_values_that_are_refused(program):
    for flag, value in (
        ("--link", "fast"), ("--ranks", "2,x"), ("--ranks", "2,100001"), ("--price", "-1"),
        ("--figure", "a.png"),
    ):  # fmt: skip
        done = ringrun("-np", "2", "--predict", flag, value, "train.py", cwd=program)
        assert done.process.returncode == 2
        assert flag in done.err


def test_a_figure_that_cannot_be_written_and_a_price_without_a_batch(program):
    flags = ["--predict", "--ranks", "2", "--price", "1", "--figure", "missing/figure.svg"]
    done = ringrun("-np", "2", *flags, "train.py", "blocking", "100000", cwd=program)
    assert done.process.returncode == 1
    assert "predicted for interfaces" in done.err
    assert "the figure missing/figure.svg cannot be written: No such file or directory" in done.err
    assert "--price needs --batch" in done.err
    assert "Traceback" not in done.err + done.out
