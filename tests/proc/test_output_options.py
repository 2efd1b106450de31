"""`--quiet` and shell completion, as the user sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.proc.test_ringrun_support import LIMIT_S, Launched
from tests.support.programs import run_python


def test_quiet_leaves_the_output_and_the_failures() -> None:
    program = "print('out')"
    loud, quiet = (
        Launched("-np", "2", *options, sys.executable, "-c", program) for options in ([], ["--quiet"])
    )
    assert loud.finish() == 0 and quiet.finish() == 0
    assert "thread per rank" in loud.err and quiet.err == ""
    assert sorted(quiet.out.splitlines()) == ["[localhost:0] out", "[localhost:1] out"]
    fails = Launched("-np", "1", "-q", sys.executable, "-c", "raise SystemExit(4)")
    assert fails.finish() == 4 and "exit code 4" in fails.err


def complete(words: str, position: int, cwd: Path) -> str:
    typed = {"_RINGRUN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    return run_python("-m", "ringrun", cwd=cwd, **typed)


def test_a_shell_completes_options_commands_and_files(tmp_path: Path) -> None:
    options = complete("ringrun --me", 1, tmp_path).split()
    assert "plain,--measure" in options
    assert {"plain,stop"} <= set(complete("ringrun st", 1, tmp_path).split())
    assert "file,tra" in complete("ringrun -np 2 tra", 3, tmp_path).split()
    script = run_python("-m", "ringrun", "completion", "bash", cwd=tmp_path)
    assert "_RINGRUN_COMPLETE=bash_complete" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=LIMIT_S).returncode == 0
