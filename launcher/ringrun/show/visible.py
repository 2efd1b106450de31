"""Text from elsewhere, made fit for a terminal. Pure."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text without colours, and with escapes for what a terminal would execute instead of showing.

    Control characters (but tabs and line ends), marks that turn the direction of writing, and half characters
    that no encoding has come out as ``\\x1b``, ``\\u202e``.
    """
    return _INVISIBLE.sub(_escape, _COLOUR.sub("", text.replace("\r\n", "\n")))


def visible_line(text: str) -> str:
    """The same as part of a line: line ends and tabs, too, come out as escapes."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
