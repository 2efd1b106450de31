"""`--tee`, `--quiet` and shell completion, as the user sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, Launched
from tests.support.programs import run_python


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tee", "3"], "Give the name of a file"),
        (["--tee", "/proc/nowhere/log"], "cannot be written"),
    ],
)
def test_what_cannot_be(options: List[str], text: str) -> None:
    job = Launched("-np", "2", *options, sys.executable, "-c", "pass")
    assert job.finish() == 2 and text in job.err


def test_all_that_is_shown_goes_to_a_file_too(tmp_path: Path) -> None:
    program = "import sys; print('out'); print('\\x1b[31mred\\x1b[0m', file=sys.stderr); sys.exit(3)"
    job = Launched("-np", "1", "--tee", "log", sys.executable, "-c", program, cwd=tmp_path)
    assert job.finish() == 3
    log = (tmp_path / "log").read_text()
    assert "[localhost:0] out\n" in log and "[localhost:0] red\n" in log and "\x1b" not in log
    assert "exit code 3" in log  # the report of the failure
    assert (tmp_path / "log").stat().st_mode & 0o022 == 0


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
    assert "plain,--metrics-port" in options
    assert {"plain,stop"} <= set(complete("ringrun st", 1, tmp_path).split())
    assert "file,tra" in complete("ringrun -np 2 tra", 3, tmp_path).split()
    script = run_python("-m", "ringrun", "completion", "bash", cwd=tmp_path)
    assert "_RINGRUN_COMPLETE=bash_complete" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=LIMIT_S).returncode == 0
