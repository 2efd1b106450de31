"""Adapters share their cores: no twelve similar lines in a row stand in two of them."""

from __future__ import annotations

import io
import keyword
import tokenize
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import pytest

import ringcomm

PACKAGE = Path(ringcomm.__file__).parent
ADAPTERS = ("torch", "tensorflow", "keras")
MAX_SIMILAR_LINES = 11

Line = Tuple[int, str]

SPACE = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def shapes(source: str) -> List[Line]:
    """The lines with code, with their line numbers; all names, strings and numbers are replaced by one token.

    Comments, imports, and lines with nothing but punctuation or an item of a list of strings do not count.
    """
    words: Dict[int, List[str]] = {}
    begins, importing = True, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SPACE:
            continue
        if token.type == tokenize.NEWLINE:
            begins = True
            continue
        if begins:
            begins, importing = False, token.string in ("import", "from")
        if not importing:
            words.setdefault(token.start[0], []).append(normal(token))
    lines = [(row, " ".join(line)) for row, line in sorted(words.items())]
    return [(row, line) for row, line in lines if line != "S ," and any(item.isalnum() for item in line)]


def normal(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
        return "N"
    return {tokenize.STRING: "S", tokenize.NUMBER: "0"}.get(token.type, token.string)


def similar_runs(one: List[Line], other: List[Line], least: int) -> Iterator[Tuple[int, int, int]]:
    """Return where a run of similar lines begins in both, and how long it is."""
    lengths: Dict[int, int] = {}
    for mine, (_, shape) in enumerate(one):
        grown: Dict[int, int] = {}
        for yours, (_, theirs) in enumerate(other):
            if shape != theirs:
                continue
            grown[yours] = length = lengths.get(yours - 1, 0) + 1
            ends = mine + 1 == len(one) or yours + 1 == len(other) or one[mine + 1][1] != other[yours + 1][1]
            if ends and length >= least:
                yield one[mine - length + 1][0], other[yours - length + 1][0], length
        lengths = grown


def files_of(adapter: str) -> List[Path]:
    return sorted((PACKAGE / adapter).rglob("*.py"))


@pytest.mark.parametrize("pair", [("torch", "tensorflow"), ("torch", "keras"), ("tensorflow", "keras")])
def test_no_twelve_similar_lines_stand_in_two_adapters(pair: Tuple[str, str]) -> None:
    ours, theirs = ([(path, shapes(path.read_text())) for path in files_of(name)] for name in pair)
    found = [
        f"{mine.relative_to(PACKAGE)}:{first} and {other.relative_to(PACKAGE)}:{second}: {length} lines"
        for mine, one in ours
        for other, two in theirs
        for first, second, length in similar_runs(one, two, MAX_SIMILAR_LINES + 1)
    ]
    assert found == []
