"""Parser of configuration files: ``key: value`` lines, and sections of them, a subset of YAML. Pure.

Horovod's configuration files are YAML, but use only this subset. The parser needs no package, and refuses all
other YAML syntax with the number of the line.
"""

from __future__ import annotations

import re
from typing import List, NamedTuple, NoReturn, Optional, Set, Tuple

from ringcomm.errors import ConfigError

_KEY = re.compile(r"([A-Za-z0-9_.-]+)\s*:(?:\s+(.*))?\Z")
_SPECIAL = "[]{}&*!|>%@`?,"
"""Characters that do not start a plain scalar in YAML."""


class Line(NamedTuple):
    """One value; `section` is "" at the top level."""

    section: str
    key: str
    text: str
    number: int


def parse_file(content: str, path: str) -> List[Line]:
    """Return the values in a file, in their order, without keys that have none. ConfigError for a line
    outside the supported subset, or a repeated key.
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
            _refuse(where, f"{key!r} occurs twice")
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
    """Return a plain or quoted scalar without its comment; None for an empty one, ``null`` and ``~``."""
    if text[:1] in ("'", '"'):
        quote = text[0]
        match = re.match(f"{quote}((?:[^{quote}]|{quote}{quote})*){quote}\\s*(#.*)?\\Z", text)
        if not match or (quote == '"' and ("\\" in match.group(1) or '""' in match.group(1))):
            _refuse(where, f"{text!r} is not one quoted value without escapes")
        return match.group(1).replace("''", "'") if quote == "'" else match.group(1)
    plain = re.split(r"(?:\A|\s)#", text)[0].strip()
    if plain[:1] and plain[0] in _SPECIAL:
        _refuse(where, f"{plain!r} is YAML syntax that is not supported here; quote it if it is plain text")
    return None if plain in ("", "~", "null") else plain


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigError(
        f"{where}: {why}. A configuration file has lines like 'timeout: 300', or a section like 'timeline:' "
        "with lines like '  filename: trace.json' below it, indented by spaces."
    )
