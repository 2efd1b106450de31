"""Tables, the picture and the claims of the documents agree with the results in the repository."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Dict

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402 - a program
from cells import time_text  # noqa: E402 - a module of programs
from figure import seconds_on_machines  # noqa: E402 - a program


def test_the_tables_have_the_medians_of_the_results() -> None:
    assert tables.differences() == [], "run: python benchmarks/tables.py"


def test_the_picture_has_the_medians_of_the_results() -> None:
    drawn = re.findall(r"<!--  ?(\S[^>]*?) -->", (ROOT / "docs" / "machines.svg").read_text())
    panels = seconds_on_machines(ROOT / "benchmarks" / "results")
    assert len(panels) == 4
    times = [time_text(seconds) for bars in panels.values() for seconds in bars.values()]
    assert [text for text in drawn if re.fullmatch(r"[\d.]+ m?s", text)] == times
    assert "(docs/machines.svg)" in (ROOT / "README.md").read_text()


def test_local_steps_lose_less_accuracy_than_docs_slow_links_says() -> None:
    """The 95 % intervals of the differences to float32, of paired seeds: in every cell, and with SGD."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "local_steps.json").read_text())
    assert len(cells) == 19
    lost: Dict[str, float] = {}
    for label, found in cells.items():
        for way, limit in (("LocalSGD", 1 / 3), ("weights only", 1 / 2)):
            if way not in found or ("AdamW" in label and way == "weights only"):
                continue
            differences = [one - other for one, other in zip(found[way], found["float32"])]
            half = {10: 2.262, 20: 2.093}[len(differences)] * statistics.stdev(differences)
            greatest = abs(statistics.mean(differences)) + half / math.sqrt(len(differences))
            if greatest > limit:
                lost[f"{label}, {way}"] = greatest
    assert lost == {}
