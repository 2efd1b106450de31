"""Find misspelt settings of ringcomm among variables, which would be ignored silently."""

from __future__ import annotations

import difflib
from typing import Iterable, List, Sequence

_CUTOFF = 0.8  # similarity of two names; other programs may use the prefix for their own variables


def misspelt(names: Iterable[str], known: Sequence[str], prefix: str) -> List[str]:
    """Return a warning for each name with this prefix that is similar, but not equal, to a known one.

    >>> misspelt(["X_TRANSPROT", "X_Y", "PATH"], ["X_TRANSPORT"], "X_")
    ['X_TRANSPROT is not a setting of ringcomm and is ignored; did you mean X_TRANSPORT?']
    """
    endings = [name[len(prefix) :] for name in known]
    found = []
    for name in sorted(names):
        if name.startswith(prefix) and name not in known:
            close = difflib.get_close_matches(name[len(prefix) :], endings, 1, _CUTOFF)
            found += [
                f"{name} is not a setting of ringcomm and is ignored; did you mean {prefix}{ending}?"
                for ending in close
            ]
    return found
