"""Parameter descriptions that many public functions share, written once and put into their docstrings.

A docstring may hold lines like ``{name}`` below ``Args:``. :func:`documented` replaces each by the text in
:data:`SHARED`, so that ``help()`` shows the whole description; the API reference does the same.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])

SHARED: Dict[str, str] = {}
"""By placeholder: the lines that replace it, as below ``Args:`` (continuation lines indented by 4)."""

_PLACEHOLDER = re.compile(r"^([ \t]*)\{(\w+)\}[ \t]*$", re.MULTILINE)


def compose(text: str) -> str:
    """A docstring with its placeholders replaced.

    Raises:
        KeyError: a placeholder is not in :data:`SHARED`.

    >>> SHARED["example"] = "example: one line,\\n    and another."
    >>> print(compose("Args:\\n    {example}"))
    Args:
        example: one line,
            and another.
    >>> del SHARED["example"]
    """

    def shared(found: re.Match[str]) -> str:
        indent, name = found.groups()
        return "\n".join(indent + line for line in SHARED[name].split("\n"))

    return _PLACEHOLDER.sub(shared, text)


def documented(function: Documented) -> Documented:
    """Decorator: the same function, its docstring composed."""
    if function.__doc__:
        function.__doc__ = compose(function.__doc__)
    return function
