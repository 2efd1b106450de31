"""What ringrun prints of what others said."""

from __future__ import annotations

import pytest

from ringrun.show.visible import columns, cut, visible, visible_line


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
        ("no room\u200b\ufeff, a tag\U000e0041", "no room\\u200b\\ufeff, a tag\\U000e0041"),
        ("half \ud800, a byte \udcff", "half \\ud800, a byte \\udcff"),
    ],
)
def test_what_a_terminal_would_execute_is_shown_instead(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()


def test_a_part_of_a_line_stays_in_it() -> None:
    assert visible_line("a\nb\tc\x1b[31m\r\n\x85") == "a\\nb\\tc\\n\\x85"


@pytest.mark.parametrize(
    ("text", "taken"),
    [("abc", 3), ("日本", 4), ("ａ", 2), ("e\u0301", 1), ("\u200d", 0), ("a\tb", 10), ("🙂", 2), ("", 0)],
)
def test_the_columns_that_a_text_takes(text: str, taken: int) -> None:
    assert columns(text) == taken
    assert cut(text, taken) == (text, 0) and cut(text, taken + 3) == (text, 3)


def test_what_does_not_fit_is_cut() -> None:
    assert cut("abcdef", 4) == ("abcd", 0)
    assert cut("日本語", 5) == ("日本", 0), "half a character is none"
    shown, left = cut("a" + "\u0301" * 1000 + "b", 9)
    assert len(shown) < 10 and shown[-1] == "b" and left == 7
