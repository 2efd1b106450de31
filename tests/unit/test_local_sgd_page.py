"""What is said of LocalSGD's defaults: the page has what was measured, and help() promises no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ringcomm/_adapter/local_sgd.py", "ringcomm/torch/local_sgd.py", "ringcomm/keras/local_sgd.py")


def test_the_page_has_the_accuracies() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    assert "batch normalization, 0.05 | 98.32 | -0.45 " in page
    assert "batch normalization, 0.1 | 97.48 | -2.24 " in page
    (item,) = re.findall(r"^4\. `LocalSGD`.*?(?=^5\.)", page, re.MULTILINE | re.DOTALL)
    assert "loses accuracy at high ones" in item and "(#local-steps-at-ordinary-learning-rates)" in item


@pytest.mark.parametrize("source", SOURCES)
def test_the_docstrings_warn(source: str) -> None:
    text = " ".join((ROOT / source).read_text().split())
    assert "loses accuracy (-2.2 points at twice the usual rate with batch normalization, -0.5 at" in text
