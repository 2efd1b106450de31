"""What is said of LocalSGD's accuracy: the page has what was measured, and help() promises no more."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ringcomm/_adapter/local_sgd.py", "ringcomm/torch/local_sgd.py", "ringcomm/keras/local_sgd.py")
COLUMNS = ("LocalSGD", "LocalSGD, int8", "LocalSGD 16", "LocalSGD.diloco")


def test_the_page_has_the_accuracies() -> None:
    """Every row of the table is made of the accuracies in the repository."""
    page = (ROOT / "docs" / "compression.md").read_text()
    cells = json.loads((ROOT / "benchmarks" / "results" / "local_steps.json").read_text())
    assert len(cells) == 15
    for label, found in cells.items():
        (row,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.MULTILINE)
        columns = [text.strip() for text in row.split("|")]
        assert columns[0] == f"{statistics.mean(found['float32']):.2f}"
        for name, text in zip(COLUMNS, (columns[1], *columns[3:])):
            difference = statistics.mean(found[name]) - statistics.mean(found["float32"])
            assert float(text.split()[0]) == pytest.approx(difference, abs=0.006), (label, name)


def test_the_defaults_lose_nothing_with_sgd() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    table = page[page.index("### Local steps at ordinary") : page.index("## Speed\n")]
    rows = re.findall(r"^\| (?:digits|textures).*\|$", table, re.MULTILINE)
    assert len(rows) == 15
    for row in rows:
        if "AdamW" in row:
            continue
        low, high = map(float, re.findall(r"\((\S+) to (\S+)\)", row.split("|")[3])[0])
        assert -0.5 <= low <= high <= 0.5, row


@pytest.mark.parametrize("source", SOURCES)
def test_the_docstrings_name_the_page(source: str) -> None:
    text = (ROOT / source).read_text()
    assert "This is another algorithm than averaging gradients." in text and "docs/compression.md" in text
