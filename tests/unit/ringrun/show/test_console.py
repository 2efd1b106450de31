"""Consoles, and files per rank."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.show.console import (
    Console,
    NotebookConsole,
    OutputFiles,
    cut_to_width,
    own_console,
    uses_colour,
)


def cell(monkeypatch: pytest.MonkeyPatch) -> Tuple[io.StringIO, io.StringIO]:
    """The text of stdout and of stderr below a cell from now on."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def test_a_state_is_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = cell(monkeypatch)
    console = NotebookConsole()
    assert tuple(console.terminals) == (1, 2)
    console.show_state(2, [b"the table", b"loss 0.25"])
    console.show_state(2, [b"the table", b"done"])
    assert err.getvalue() == "\rloss 0.25\rdone     ", "nothing of the line before stays"
    console.write(2, b"")
    console.write(2, b"a warning\n")
    assert err.getvalue().endswith("\rdone     \r    \ra warning\n")
    console.write(2, b"another\n")
    assert err.getvalue().endswith("\ra warning\nanother\n") and out.getvalue() == ""


def test_a_line_is_removed_if_there_is_no_state_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = cell(monkeypatch)
    console = NotebookConsole()
    console.show_state(2, [])
    assert err.getvalue() == ""
    console.show_state(1, [b"10 %"])
    console.show_state(2, [b"20 %"])
    assert out.getvalue() == "\r10 %\r    \r" and err.getvalue() == "\r20 %"
    console.show_state(2, [])
    assert err.getvalue() == "\r20 %\r    \r"
    console.show_state(2, [b"30 %"])
    console.close()
    console.close()
    assert err.getvalue() == "\r20 %\r    \r\r30 %\r    \r"


def test_the_console_of_a_function_depends_on_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream(io.StringIO):
        """As the kernel of Jupyter puts it in place of ``sys.stdout``."""

    assert type(own_console()) is Console
    OutStream.__module__ = "ipykernel.iostream"
    monkeypatch.setattr(sys, "stdout", OutStream())
    assert isinstance(own_console(), NotebookConsole)


def test_a_state_fits_into_a_row() -> None:
    assert cut_to_width(b"123456789", 5) == b"1234"
    assert cut_to_width(b"\x1b[1m12\x1b[0m3456789", 5) == b"\x1b[1m12\x1b[0m34\x1b[0m"
    red = b"\x1b[38:2::255:0:0m"
    assert cut_to_width(red + b"123456789", 5) == red + b"1234\x1b[0m"
    assert cut_to_width("━━━━━━".encode(), 4) == "━━━".encode()
    assert cut_to_width("日本語\tx".encode(), 6) == "日本".encode(), "a row that wraps stays"


def test_colours_are_for_terminals() -> None:
    assert uses_colour({"TERM": "xterm"}, True)
    assert not uses_colour({"TERM": "xterm"}, False)
    assert not uses_colour({"NO_COLOR": "1"}, True)
    assert not uses_colour({"TERM": "dumb"}, True)


# ---- files --------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_of_ranks_that_come_and_go_are_closed(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path, 1)
    before = descriptors()
    for rank in range(1, 20):
        files.add(rank)
        files.write(rank, 1, b"a line\n")
        files.remove(rank)
    assert descriptors() == before
    files.write(5, 1, b"late\n")
    assert (tmp_path / "rank.5" / "stdout").read_text() == "a line\n"
    files.close()


def test_a_link_in_the_place_of_a_ranks_folder_is_not_followed(tmp_path: Path) -> None:
    """The folder is opened once, and what is below it by that descriptor."""
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank.0").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/out/rank.0 cannot be written")):
        OutputFiles(tmp_path / "out", 1)
    assert list((tmp_path / "other").iterdir()) == []
