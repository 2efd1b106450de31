"""What ringrun sends of itself: its size is the one that the page names."""

from __future__ import annotations

import re
from pathlib import Path

from ringrun.ship.package import Package, own_package

PAGE = Path(__file__).resolve().parents[4] / "docs" / "machines.md"


def test_the_page_names_the_size_of_what_is_sent() -> None:
    (named,) = re.findall(r"this machine's version, about ([0-9.]+) MB", PAGE.read_text())
    assert abs(len(own_package.__wrapped__().archive) / 1e6 - float(named)) < 0.15


def test_equal_files_give_equal_archives() -> None:
    one, other = (Package("x", {"a/b.py": b"1", "c.py": b"2"}) for _ in range(2))
    assert one.archive == other.archive and one.digest == other.digest
    assert Package("x", {"a/b.py": b"1"}).digest != one.digest
