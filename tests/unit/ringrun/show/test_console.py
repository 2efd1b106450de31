"""Consoles, and files per rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringcomm.errors import ConfigError
from ringrun.show.console import Console, OutputFiles, cut_to_width


def test_a_state_fits_into_a_row() -> None:
    assert cut_to_width(b"123456789", 5) == b"1234"
    assert cut_to_width(b"\x1b[1m12\x1b[0m3456789", 5) == b"\x1b[1m12\x1b[0m34\x1b[0m"
    red = b"\x1b[38:2::255:0:0m"
    assert cut_to_width(red + b"123456789", 5) == red + b"1234\x1b[0m"
    assert cut_to_width("日本語\tx".encode(), 6) == "日本".encode(), "a row that wraps stays"


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Console().coloured({}) == {1: False, 2: False}
    monkeypatch.setattr(Console, "terminals", (2,))
    assert Console().coloured({}) == {1: False, 2: True}
    assert Console().coloured({"NO_COLOR": "1"}) == {1: False, 2: False}


def test_files_of_ranks_that_come_and_go_are_closed(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for rank in range(1, 20):
        files.add(rank)
        files.write(rank, 1, b"a line\n")
        files.remove(rank)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert files.write(5, 1, b"late\n") == ""
    assert (tmp_path / "rank.5" / "stdout").read_text() == "a line\n"


def test_a_link_in_the_place_of_a_ranks_folder_is_not_followed(tmp_path: Path) -> None:
    """The folder is opened once, and what is below it by that descriptor."""
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank.0").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/out/rank.0 cannot be written")):
        OutputFiles(tmp_path / "out").add(0)
    assert list((tmp_path / "other").iterdir()) == []
