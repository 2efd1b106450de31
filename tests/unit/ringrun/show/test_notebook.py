"""The output below a cell of a notebook: text objects, and one line that is rewritten."""

from __future__ import annotations

import io
import sys
from typing import Tuple

import pytest

from ringrun.show.console import Console
from ringrun.show.notebook import NotebookConsole, own_console


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
