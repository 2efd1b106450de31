"""The file for citations names the version that this is."""

from __future__ import annotations

from pathlib import Path

from ringcomm.version import __version__


def test_the_citation_has_the_version() -> None:
    text = (Path(__file__).resolve().parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in text
