"""Counts refused connections, for messages. Pure."""

from __future__ import annotations

from collections import Counter

_MAX_KINDS = 64
"""This many origins and reasons are counted apart; unauthenticated peers must not fill the memory."""


class Refusals:
    """The number of refused connections, and the most frequent reason."""

    def __init__(self) -> None:
        self.total = 0
        self._kinds: Counter[str] = Counter()

    def add(self, origin: str, reason: str) -> None:
        """Count one more refused connection."""
        self.total += 1
        kind = f"{origin}: {reason}"
        if kind in self._kinds or len(self._kinds) < _MAX_KINDS:
            self._kinds[kind] += 1

    def clear(self) -> None:
        """Start again from zero."""
        self.total = 0
        self._kinds.clear()

    def __bool__(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        """``12 connections (mostly 10.0.0.9: no answer)``, or "" if there was none."""
        if not self.total:
            return ""
        ((what, _),) = self._kinds.most_common(1)
        return f"{self.total} connection{'s' if self.total > 1 else ''} (mostly {what})"
