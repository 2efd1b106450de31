"""Shell completion, as the user sees it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.proc.test_ringrun_support import LIMIT_S
from tests.support.programs import run_python


def complete(words: str, position: int, cwd: Path) -> str:
    typed = {"_RINGRUN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    return run_python("-m", "ringrun", cwd=cwd, **typed)


def test_a_shell_completes_options_commands_and_files(tmp_path: Path) -> None:
    options = complete("ringrun --en", 1, tmp_path).split()
    assert "plain,--encrypt" in options
    assert {"plain,stop"} <= set(complete("ringrun st", 1, tmp_path).split())
    assert "file,tra" in complete("ringrun -np 2 tra", 3, tmp_path).split()
    script = run_python("-m", "ringrun", "completion", "bash", cwd=tmp_path)
    assert "_RINGRUN_COMPLETE=bash_complete" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=LIMIT_S).returncode == 0
