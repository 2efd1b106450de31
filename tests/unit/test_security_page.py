"""SECURITY.md: every line of its tables names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
LINK = re.compile(r"\[(\w+)\]\((tests/[\w/]+\.py)\)")


def test_every_line_links_a_test_that_is_there_or_is_out_of_scope():
    rows = [row for row in ROWS if not row.startswith(("| attack", "| ---"))]
    assert len(rows) > 40
    for row in rows:
        shown = row.rsplit(" | ", 1)[1]
        assert LINK.search(shown) or shown == "out of scope |", row
    for name, path in LINK.findall(PAGE):
        text = (ROOT / path).read_text()
        assert name == Path(path).stem or f"def {name}(" in text, f"{path} has no {name}"
