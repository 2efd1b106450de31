"""External text made safe for a terminal. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import List, Tuple

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_MAX_MARKS = 4
"""Combining characters on one character that are shown: more would cover neighbouring lines."""
_TAB_COLUMNS = 8


def visible(text: str) -> str:
    """Return the text without colours, and with escapes (``\\x1b``) for control characters except tabs and
    line ends, marks that change the direction of writing or have no width, and lone surrogates.
    """
    return _INVISIBLE.sub(_escape, COLOUR.sub("", text.replace("\r\n", "\n")))


def visible_line(text: str) -> str:
    """Return the text as part of a line: tabs and line ends also become escapes."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _columns_of(character: str) -> int:
    if character == "\t":
        return _TAB_COLUMNS
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def columns(text: str) -> int:
    """Return the maximum number of columns of a text on a terminal; a tab counts as eight."""
    return len(text) if text.isascii() and "\t" not in text else sum(map(_columns_of, text))


def cut(text: str, room: int) -> Tuple[str, int]:
    """Return the beginning of a text that fits into `room` columns, and the remaining columns."""
    if text.isascii() and "\t" not in text:
        return text[:room], max(0, room - len(text))
    kept: List[str] = []
    marks = 0
    for character in text:
        taken = _columns_of(character)
        if taken > room:
            return "".join(kept), 0
        marks = 0 if taken else marks + 1
        if marks <= _MAX_MARKS:
            kept.append(character)
            room -= taken
    return "".join(kept), room
