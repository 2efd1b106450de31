"""The picture in the README shows what the results in the repository say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from cells import time_text  # noqa: E402 - a module of programs
from figure import seconds_on_machines  # noqa: E402 - a program


def test_the_picture_has_the_medians_of_the_results():
    drawn = re.findall(r"<!--  ?(\S[^>]*?) -->", (ROOT / "docs" / "machines.svg").read_text())
    panels = seconds_on_machines(ROOT / "benchmarks" / "results")
    assert len(panels) == 4
    times = [time_text(seconds) for bars in panels.values() for seconds in bars.values()]
    assert [text for text in drawn if re.fullmatch(r"[\d.]+ m?s", text)] == times
    assert "(docs/machines.svg)" in (ROOT / "README.md").read_text()
