"""``ringrun diagnose DIR``: read the flight records of a failed job again."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

from .records import read_records
from .waiting import diagnose


def diagnose_folder(folder: Path) -> Tuple[str, int]:
    """Return the user's text and the exit code, 1 if a file is not valid. ConfigError without a record."""
    reports, bad = read_records(folder)
    paragraphs: List[str] = []
    if reports:
        paragraphs.append("\n".join(diagnose(reports)))
    if bad:
        paragraphs.append("\n".join(bad))
    return "\n\n".join(paragraphs) + "\n", 1 if bad else 0
