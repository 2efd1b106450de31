"""What is said of LocalSGD's defaults: the page has what was measured, and help() promises no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ringcomm/_adapter/local_sgd.py", "ringcomm/torch/local_sgd.py", "ringcomm/keras/local_sgd.py")


def test_the_page_has_the_accuracies() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    assert "| 0.02 | 99.12 | 96.88 |" in page and "| 0.08 | 98.60 | 74.7 |" in page
    (item,) = re.findall(r"^4\. `LocalSGD`.*?(?=^5\.)", page, re.MULTILINE | re.DOTALL)
    assert "loses accuracy, or diverges" in item and "(#local-steps-at-ordinary-learning-rates)" in item


@pytest.mark.parametrize("source", SOURCES)
def test_the_docstrings_warn(source: str) -> None:
    text = " ".join((ROOT / source).read_text().split())
    assert "loses accuracy, or diverges, at ordinary learning rates (98.60 % became 74.7 %" in text
