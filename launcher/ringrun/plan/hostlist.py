"""Slurm's lists of nodes (``node[01-03,7],gpu[1-2]-ib[0,3]``) and of tasks per node (``2(x3),1``). Pure."""

from __future__ import annotations

import re
from typing import List

from ringcomm.errors import ConfigError

MAX_HOSTS = 1 << 16
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")


def expand(text: str) -> List[str]:
    """Return the names in a node list in its order, repeated ones included. The last brackets of a name count
    fastest, and numbers keep leading zeros. ConfigError for another form, or more than 65536 names.
    """
    names: List[str] = []
    for item in _items(text):
        names += _expanded(item, text)
        if len(names) > MAX_HOSTS:
            raise ConfigError(f"The node list {text!r:.80} has more than {MAX_HOSTS} names.")
    return names


def _items(text: str) -> List[str]:
    """Return the parts between commas outside brackets."""
    items, start, depth = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _bad(text, "its brackets do not match")
        if letter == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise _bad(text, "a bracket is not closed")
    found = [item.strip() for item in (*items, text[start:])]
    if not all(found):
        raise _bad(text, "a name is missing")
    return found


def _expanded(item: str, text: str) -> List[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    tails = _expanded(tail, text)
    numbers = [number for part in inside.split(",") for number in _numbers(part.strip(), text)]
    if len(numbers) * len(tails) > MAX_HOSTS:
        raise ConfigError(f"The node list {text!r:.80} has more than {MAX_HOSTS} names.")
    return [head + number + tail for number in numbers for tail in tails]


def _numbers(part: str, text: str) -> List[str]:
    found = _RANGE.match(part)
    if found is None:
        raise _bad(text, f"{part!r} is neither a number nor a range")
    first, last = found.group(1), found.group(2) or found.group(1)
    if int(last) < int(first) or int(last) - int(first) > MAX_HOSTS:
        raise _bad(text, f"{part!r} is not a range")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def tasks_per_node(text: str) -> List[int]:
    """Return the numbers in a list like ``3,1`` or ``2(x2),1``; ConfigError for another form."""
    counts: List[int] = []
    for part in text.split(","):
        found = _COUNT.match(part.strip())
        if found is None or int(found.group(2) or 1) > MAX_HOSTS:
            raise ConfigError(f"{text!r:.80} is not a list of tasks per node like '2(x3),1'.")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"{text!r:.80} is not a list of nodes like 'node[01-03],gpu1': {why}.")
