"""Ranks that never join, or never call a collective, have trained alone: ringrun says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun

ALONE = "ringrun: no rank called ringcomm.init(): each trained alone"


def test_ranks_that_call_init_and_nothing_else_have_trained_alone(tmp_path: Path) -> None:
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    job = ringrun("-np", "2", "inits.py", cwd=tmp_path)
    assert job.process.returncode == 0 and "every rank called init(), and none made" in job.err, job.err


@pytest.mark.parametrize(("program", "told"), [("plain.py", 1), ("outside.py", 0)])
def test_ranks_that_never_call_init_have_trained_alone(tmp_path: Path, program: str, told: int) -> None:
    (tmp_path / "plain.py").write_text("import ringcomm\n")
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    child = "subprocess.call([sys.executable, 'inits.py'], close_fds=False)"
    (tmp_path / "outside.py").write_text(f"import subprocess, sys\nsys.exit({child})\n")
    job = ringrun("-np", "2", program, cwd=tmp_path)
    assert job.process.returncode == 0 and job.err.count(ALONE) == told, job.err
