"""Scripts beside a file that is imported instead of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ringrun


@pytest.mark.parametrize("name", ["numpy", pytest.param("socket", marks=pytest.mark.release)])
def test_the_file_that_shadows_a_module_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import ringcomm as rc\nrc.init()\n")
    done = ringrun("-np", "1", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    assert f"{tmp_path / name}.py has the name of the module {name}, and is" in done.err, done.err
    assert "pip install" not in done.err


def test_the_launcher_itself_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("numpy", "json", "click", "signal", "ringcomm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("print('ran')\n")
    done = ringrun("-np", "1", "own/train.py", cwd=tmp_path)
    assert done.process.returncode == 0 and "ran" in done.out, done.err
