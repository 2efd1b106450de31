"""The example in docs/reliability.md, run as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"


def test_the_example_passes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# test_training.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "test_training.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_training.py"]
    root = str(PAGE.parents[1])
    env = {"PYTHONPATH": root, "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr
