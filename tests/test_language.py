"""Words that the project does not use, and the number of their uses that are left in each file.

    python tests/test_language.py             lists what is left, worst files first
    python tests/test_language.py --write     writes the allowances anew: they may only go down

Names count like text: ``lost_whoever`` and ``LostWhoever`` both contain ``whoever``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWANCES = ROOT / "tests" / "language_allowances.txt"
SCANNED = ("ringcomm", "launcher", "docs", "benchmarks", "examples", "tests",
           "README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")  # fmt: skip

INSTEAD = {
    r"who|whoever|whom|whomever": "rank, process, peer, host, caller, thread",
    r"somebody|someone|anybody|anyone|nobody|everybody|everyone": "a rank, any peer, no process, all ranks",
    r"shall": "is to, must, will",
    r"strangers?": "unauthenticated peers",
    r"signs? of life|vigils?": "heartbeat, failure detector",
    r"verdicts?|condemn(?:s|ed|ing)?|sentenced|sentencing": "root cause, abort",
    r"company|companies|post office|lanes?": "group transport, point-to-point engine, channels",
    r"orders|obeys?|obeyed|obeying": "responses, execute",
    r"carried(?! out)|rides?|riding|rode": "piggybacked, sent with",
    r"standings?": "progress",
    r"soundings?": "calibration",
    r"mailbox(?:es)?": "control messages",
    r"rosters?": "members",
    r"journals?": "history",
    r"deaf|rung|out of breath|jostl(?:e|es|ing)|shelf|shelves": "what the variable holds",
    r"speaks?|spoke|hears?|wants?|tells?|knows?": "sends, receives, requires, reports, has",
}
"""Patterns of words (of text in lower case, names split into words), and what to say in their place."""

_PATTERN = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in INSTEAD))
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ON_THE_WIRE = re.compile(r"([\"`])(?:carried|lanes|orders|standing)\1|\blanes=")
"""Names of messages, and of fields of records and messages, which stay as they are."""


def unwanted_words(text: str) -> List[str]:
    """The words of ``text`` that the project does not use, in order, with repetitions."""
    return _PATTERN.findall(_HUMP.sub(" ", _ON_THE_WIRE.sub("", text)).replace("_", " ").lower())


def scanned_files() -> List[Path]:
    """The files that are checked: Python and Markdown, except this one, which has to name the words."""
    paths: List[Path] = []
    for name in SCANNED:
        top = ROOT / name
        paths += [top] if top.is_file() else [*top.rglob("*.py"), *top.rglob("*.md")]
    return sorted(path for path in paths if path != Path(__file__).resolve())


def what_is_there() -> Dict[str, int]:
    """The number of unwanted words, by file; files without any are left out."""
    counts = {str(path.relative_to(ROOT)): len(unwanted_words(path.read_text())) for path in scanned_files()}
    return {name: count for name, count in counts.items() if count}


def allowed() -> Dict[str, int]:
    """The allowances: as many unwanted words as each file had when they were last written."""
    lines = (line.split(None, 1) for line in ALLOWANCES.read_text().splitlines())
    return {name: int(count) for count, name in lines}


def test_files_have_no_more_unwanted_words_than_they_had():
    limits = allowed()
    worse = {name: f"{count}, allowed {limits.get(name, 0)}" for name, count in what_is_there().items()
             if count > limits.get(name, 0)}  # fmt: skip
    assert not worse, f"use other words (see INSTEAD): {worse}"


def test_allowances_go_down_with_what_is_there():
    there = what_is_there()
    stale = {name: f"{limit}, but there are {there.get(name, 0)}" for name, limit in allowed().items()
             if limit > there.get(name, 0)}  # fmt: skip
    assert not stale, f"python tests/test_language.py --write: {stale}"


@pytest.mark.parametrize(
    "text, found",
    [
        ("# Whoever comes next", ["whoever"]),
        ("def lost_whoever(NobodyHere):", ["whoever", "nobody"]),
        ("a sign of life, and carried out in that order", ["sign of life"]),
        ("the whole; showing; shallow; planes; understanding", []),
        ('content["lanes"] of `orders`, and other lanes', ["lanes"]),
    ],
)
def test_words_are_found_in_text_and_in_names(text: str, found: List[str]):
    assert unwanted_words(text) == found


def main(arguments: List[str]) -> None:
    """Print a fresh table, or write it."""
    there = what_is_there()
    if arguments == ["--write"]:
        ALLOWANCES.write_text("".join(f"{count:4} {name}\n" for name, count in sorted(there.items())))
        return
    worst: List[Tuple[int, str]] = sorted(((count, name) for name, count in there.items()), reverse=True)
    for count, name in worst:
        words = sorted(set(unwanted_words((ROOT / name).read_text())))
        print(f"{count:4} {name}: {', '.join(words)}")


if __name__ == "__main__":
    main(sys.argv[1:])
