"""Copies of the project in which tests run while something in them is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, NamedTuple, Set

ROOT = Path(__file__).resolve().parents[2]
_PARTS = (
    *("ringcomm", "launcher", "tests", "examples", "docs", "benchmarks", ".ci"),
    *("pyproject.toml", "README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)


class Outcome(NamedTuple):
    """What tests have ended with: pytest's exit code (-1: the time limit has ended it), and its output."""

    code: int
    output: str


def copy_project(target: Path) -> Path:
    """The sources, the tests and what they read, somewhere else."""
    for name in _PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def environ_for(where: Path) -> Dict[str, str]:
    """The environment in which Python imports the copy, and nothing of this process' own settings."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("RINGCOMM_", "PYTEST_"))
    }
    environ.update(PYTHONPATH=f"{where}:{where / 'launcher'}", PYTHONDONTWRITEBYTECODE="1")
    return environ


def collected(where: Path, paths: List[str]) -> Set[str]:
    """The tests that there are in a copy under these paths."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *paths]
    listing = subprocess.run(
        command, cwd=where, env=environ_for(where), stdout=subprocess.PIPE, text=True, check=False
    )
    return {line for line in listing.stdout.splitlines() if "::" in line}


def run_tests(where: Path, arguments: List[str], limit_s: float, keep_bytecode: bool = False) -> Outcome:
    """Run pytest in a copy until the first test fails.

    Args:
        where: the copy.
        arguments: which tests.
        limit_s: after so many seconds pytest and all that it has started are killed.
        keep_bytecode: whether what is compiled stays there for later runs. Only while the copy is as it was
            copied: the files still have the times of the originals then, and a changed one has another.
    """
    environ = environ_for(where)
    if keep_bytecode:
        del environ["PYTHONDONTWRITEBYTECODE"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--timeout", "40", "-rfE"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=where,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Outcome(process.returncode, output)
    except subprocess.TimeoutExpired as late:
        return Outcome(-1, (late.stdout or b"").decode(errors="replace"))
    finally:
        # What a test with a bug in it has left running in its session.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
