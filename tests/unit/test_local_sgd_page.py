"""What is said of LocalSGD's accuracy: the page has what was measured, and help() promises no more."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ringcomm/_adapter/local_sgd.py", "ringcomm/torch/local_sgd.py", "ringcomm/keras/local_sgd.py")
COLUMNS = {
    1: "LocalSGD", 3: "weights only", 5: "weights only, int8", 6: "LocalSGD 16", 7: "LocalSGD.diloco"
}  # fmt: skip
WEIGHTS_ONLY = 5


def test_the_page_has_the_accuracies() -> None:
    """Every row of the table is made of the accuracies in the repository."""
    page = (ROOT / "docs" / "compression.md").read_text()
    cells = json.loads((ROOT / "benchmarks" / "results" / "local_steps.json").read_text())
    assert len(cells) == 19 and max(found["longest"] for found in cells.values()) <= 50
    for label, found in cells.items():
        (row,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.MULTILINE)
        columns = [text.strip() for text in row.split("|")]
        assert columns[0] == f"{statistics.mean(found['float32']):.2f}"
        for place, name in COLUMNS.items():
            if name not in found:
                assert columns[place] == "-"
                continue
            pairs = list(zip(found[name], found["float32"]))  # of the same seeds
            difference = statistics.mean(one - other for one, other in pairs)
            shown = float(columns[place].split()[0].strip(","))
            assert shown == pytest.approx(difference, abs=0.006), (label, name)
            assert name != "LocalSGD" or f", {len(pairs)} seed" in columns[place], label


def test_no_cell_loses_more_than_half_a_point_in_the_mean() -> None:
    cells = json.loads((ROOT / "benchmarks" / "results" / "local_steps.json").read_text())
    losses = {
        label: statistics.mean(other - one for one, other in zip(found["LocalSGD"], found["float32"]))
        for label, found in cells.items()
    }
    assert max(losses.values()) < 0.47
    assert max(loss for label, loss in losses.items() if "AdamW" in label) < 0.19


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
