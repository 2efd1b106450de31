"""What ringrun prints of what others said."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from ringrun.job.launch import Options, prepare
from ringrun.job.outcome import not_started
from ringrun.show.console import Console
from ringrun.show.printer import Printer
from ringrun.show.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines, über", "plain\ttext\nof two lines, über"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x9b2J", "\\x1b[2J\\x9b2J"),
        ("over\rwritten\b", "over\\x0dwritten\\x08"),
        ("a line of ssh\r\n", "a line of ssh\n"),
        ("evil\u202egpj.exe", "evil\\u202egpj.exe"),
        ("half \ud800, a byte \udcff", "half \\ud800, a byte \\udcff"),
    ],
)
def test_what_a_terminal_would_execute_is_shown_instead(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()


class Kept(Console):
    def __init__(self) -> None:
        self.chunks: List[Tuple[int, bytes]] = []

    def write(self, stream: int, data: bytes) -> None:
        self.chunks.append((stream, data))


def test_a_word_of_ringrun_and_its_box() -> None:
    job, console = prepare(Options(np=1), ["true"]), Kept()
    Printer(job, console, {1: False, 2: False}, lambda: 0.0).show("from there: \x1b]52;c;x\x07\nhalf \ud800")
    assert console.chunks == [(2, b"ringrun: from there: \\x1b]52;c;x\\x07\nringrun: half \\ud800\n")]
    assert "\\x1b]0;x" in not_started(job, {0: "it said \x1b]0;x"}, ()).report
