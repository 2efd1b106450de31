"""What is said of LocalSGD's accuracy: no cell loses more, and help() promises no more."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ringcomm/_adapter/local_sgd.py", "ringcomm/torch/local_sgd.py")
WEIGHTS_ONLY = 5


def test_no_cell_loses_anything() -> None:
    """Each 95 % interval of differences to float32, of twenty seeds, lies within a third of a point."""
    cells = json.loads((ROOT / "benchmarks" / "results" / "local_steps.json").read_text())
    assert len(cells) == 19
    for label, found in cells.items():
        differences = [one - other for one, other in zip(found["LocalSGD"], found["float32"])]
        assert len(differences) == 20, label
        half = 2.093 * statistics.stdev(differences) / math.sqrt(20)
        assert abs(statistics.mean(differences)) + half <= 1 / 3, label


def test_weights_only_lose_nothing_with_sgd() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    table = page[page.index("### Local steps at ordinary") : page.index("## Speed\n")]
    rows = re.findall(r"^\| (?:digits|textures|characters).*\|$", table, re.MULTILINE)
    assert len(rows) == 19
    measured = [row for row in rows if "AdamW" not in row and row.split("|")[WEIGHTS_ONLY].strip() != "-"]
    assert len(measured) == 9
    for row in measured:
        low, high = map(float, re.findall(r"\((\S+) to (\S+)\)", row.split("|")[WEIGHTS_ONLY])[0])
        assert -0.5 <= low <= high <= 0.5, row


@pytest.mark.parametrize("source", SOURCES)
def test_the_docstrings_name_the_page(source: str) -> None:
    text = (ROOT / source).read_text()
    assert "This is another algorithm than averaging gradients." in text and "docs/compression.md" in text
