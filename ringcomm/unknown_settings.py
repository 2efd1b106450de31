"""Names that look like a setting of ringcomm and are none: whoever sets one believes that it works."""

from __future__ import annotations

import difflib
from typing import Iterable, List, Sequence

_CUTOFF = 0.8
"""How alike two names must be; others may use the prefix for purposes of their own."""


def misspelt(names: Iterable[str], known: Sequence[str], prefix: str) -> List[str]:
    """A sentence for each name that is nearly, but not quite, one that is known.

    >>> misspelt(["X_TRANSPROT", "X_Y", "PATH"], ["X_TRANSPORT"], "X_")
    ['X_TRANSPROT is not a setting of ringcomm, so nobody reads it; did you mean X_TRANSPORT?']
    """
    endings = [name[len(prefix) :] for name in known]
    found = []
    for name in sorted(names):
        if name.startswith(prefix) and name not in known:
            close = difflib.get_close_matches(name[len(prefix) :], endings, 1, _CUTOFF)
            found += [
                f"{name} is not a setting of ringcomm, so nobody reads it; did you mean {prefix}{ending}?"
                for ending in close
            ]
    return found
