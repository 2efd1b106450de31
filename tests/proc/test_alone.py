"""Ranks that never join, or never call a collective, have trained alone: ringrun says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Tuple

import pytest

from tests.proc.test_ringrun_support import ringrun

ALONE = "ringrun: no rank called ringcomm.init(): each trained alone"


def test_ranks_that_call_init_and_nothing_else_have_trained_alone(tmp_path: Path) -> None:
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    job = ringrun("-np", "2", "inits.py", cwd=tmp_path)
    assert job.process.returncode == 0 and "every rank called init(), and none made" in job.err, job.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-np", "2", "plain.py"), 1),
        *(
            pytest.param(("-np", *words.split()), told, marks=pytest.mark.full)
            for words, told in [
                (f"2 {sys.executable} plain.py", 1),
                ("2 -m plain", 0),
                ("1 plain.py", 0),
                ("2 -q plain.py", 0),
                ("2 true", 0),
                (f"2 {sys.executable} -c print(1)", 0),
                ("2 inits.py", 0),
                ("2 outside.py", 0),
            ]  # fmt: skip
        ),
    ],
)
def test_ranks_that_never_call_init_have_trained_alone(
    tmp_path: Path, options: Tuple[str, ...], told: int
) -> None:
    (tmp_path / "plain.py").write_text("import ringcomm\n")
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    child = "subprocess.call([sys.executable, 'inits.py'], close_fds=False)"
    (tmp_path / "outside.py").write_text(f"import subprocess, sys\nsys.exit({child})\n")
    job = ringrun(*options, cwd=tmp_path)
    assert job.process.returncode == 0 and job.err.count(ALONE) == told, job.err
