"""Texts of hosts in messages, and why a host did not start. Pure."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple


class Failure(NamedTuple):
    """Why a host did not start; `text` is a paragraph for the user."""

    text: str
    retry: bool = False  # a retry may succeed
    no_python: bool = False  # the host lacks the interpreter
    may_appear: bool = False  # retry until the start timeout, as the host may still appear


NOTHING = "nothing"
"""Replaces the output of a program that printed nothing."""


def quoted(text: str) -> str:
    """Return a host's text on one line without control characters, in quotation marks unless it is one word.

    >>> quoted("/home/me/a.py"), quoted("gone. Run: x")
    ('/home/me/a.py', "'gone. Run: x'")
    """
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shlex.quote(shown) if "'" not in shown else '"' + re.sub(r'(["$`\\])', r"\\\1", shown) + '"'


def last_lines(text: str) -> str:
    """Return the last two lines of an output as one, quoted and without a full stop; or NOTHING."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return quoted("; ".join(lines[-2:])[-400:].rstrip(".")) if lines else NOTHING
