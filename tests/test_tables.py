"""The tables of the documents that are made of benchmarks/results have their numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import tables  # noqa: E402


def test_pages_have_the_numbers_of_the_results() -> None:
    assert tables.differences() == []


def test_a_changed_number_is_found() -> None:
    page = (ROOT / "docs" / "unequal.md").read_text()
    (table,) = [each for each in tables.TABLES if each.head.startswith(" | fast one alone")]
    changed = page.replace("0.294 s | 0.279 s", "0.294 s | 0.278 s")
    assert changed != page == tables.made(changed, [table])


def test_the_command_makes_the_check() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], cwd=ROOT)
    assert done.returncode == 0
