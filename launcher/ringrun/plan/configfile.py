"""The part of YAML that a configuration file needs: ``key: value`` lines, and sections of them. Pure.

Horovod's configuration files are YAML, but only this much of it is used in them. Reading just that needs no
package to be installed, and whatever else YAML can do is refused with its line number, never guessed at.
"""

from __future__ import annotations

import re
from typing import List, NamedTuple, NoReturn, Optional, Set, Tuple

from ringcomm.errors import ConfigError

_KEY = re.compile(r"([A-Za-z0-9_.-]+)\s*:(?:\s+(.*))?\Z")
_SPECIAL = "[]{}&*!|>%@`?,"
"""Characters that start something other than a plain word in YAML."""


class Line(NamedTuple):
    """One value: ``section`` is "" at the top level."""

    section: str
    key: str
    text: str
    number: int


def parse_file(content: str, path: str) -> List[Line]:
    """The values in a file, in its order. A key without a value counts as not being there.

    Raises:
        ConfigError: a line is not of the forms that are understood, or a key comes twice.
    """
    found: List[Line] = []
    seen: Set[Tuple[str, str]] = set()
    section, indent = "", 0
    for number, raw in enumerate(content.splitlines(), 1):
        where = f"{path}, line {number}"
        bare = raw.strip()
        if not bare or bare.startswith("#") or (number == 1 and bare == "---"):
            continue
        depth = len(raw) - len(raw.lstrip())
        if "\t" in raw[:depth]:
            _refuse(where, "it is indented with a tab")
        key, text = _key_and_value(bare, where)
        if depth == 0:
            section, indent = "", 0
        elif not section or (indent and depth != indent):
            _refuse(where, "it is indented, but not as a line of the section above it")
        else:
            indent = depth
        if (section, key) in seen:
            _refuse(where, f"{key!r} is there twice")
        seen.add((section, key))
        if text is not None:
            found.append(Line(section, key, text, number))
        elif depth == 0:
            section, indent = key, 0
    return found


def _key_and_value(bare: str, where: str) -> Tuple[str, Optional[str]]:
    match = _KEY.match(bare)
    if not match:
        _refuse(where, f"{bare!r} is not of the form 'key: value'")
    return match.group(1), _value(match.group(2) or "", where)


def _value(text: str, where: str) -> Optional[str]:
    """A plain or quoted word without the comment after it; None for nothing (``null``, ``~``)."""
    if text[:1] in ("'", '"'):
        quote = text[0]
        match = re.match(f"{quote}((?:[^{quote}]|{quote}{quote})*){quote}\\s*(#.*)?\\Z", text)
        if not match or (quote == '"' and ("\\" in match.group(1) or '""' in match.group(1))):
            _refuse(where, f"{text!r} is not one word in plain quotes")
        return match.group(1).replace("''", "'") if quote == "'" else match.group(1)
    plain = re.split(r"(?:\A|\s)#", text)[0].strip()
    if plain[:1] and plain[0] in _SPECIAL:
        _refuse(where, f"{plain!r} is YAML that is not understood here; quote it if it is a plain word")
    return None if plain in ("", "~", "null") else plain


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigError(
        f"{where}: {why}. A configuration file has lines like 'timeout: 300', or a section like 'timeline:' "
        "with lines like '  filename: trace.json' below it, indented by spaces."
    )
