"""Hints for misspelt names, of functions, settings, options and commands. Pure."""

from __future__ import annotations

import difflib
from typing import Iterable, List, Sequence


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known name that is most like a misspelt one, at least by `likeness` (0 to 1), or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, likeness)), "")


def misspelt(names: Iterable[str], known: Sequence[str], prefix: str) -> List[str]:
    """Return a warning for each name with this prefix that is similar, but not equal, to a known one.

    >>> misspelt(["X_TRANSPROT", "X_Y", "PATH"], ["X_TRANSPORT"], "X_")
    ['X_TRANSPROT is not a setting of ringcomm and is ignored; did you mean X_TRANSPORT?']
    """
    endings = [name[len(prefix) :] for name in known]
    found = []
    for name in sorted(names):
        # Other programs may use the prefix for their own variables.
        near = nearest(name[len(prefix) :], endings, 0.8) if name.startswith(prefix) else ""
        if near and name not in known:
            found.append(f"{name} is not a setting of ringcomm and is ignored; did you mean {prefix}{near}?")
    return found
