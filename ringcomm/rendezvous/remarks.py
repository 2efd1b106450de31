"""Notes and warnings of ranks to the user. Pure."""

from __future__ import annotations

from typing import List, Set

from ..wire.messages import Message
from .actions import Action, Notice

_MAX_TOPICS = 16
"""The maximum number of warnings that are passed on."""


class Remarks:
    """Passes on what the ranks of one generation report to the user."""

    def __init__(self) -> None:
        self._warned: Set[str] = set()

    def told(self, rank: int, message: Message) -> List[Action]:
        """Pass on a ``note`` or a ``warning`` of a rank; of several warnings of one topic only the first."""
        kind = message["type"]
        if kind == "note":
            return [Notice("note", message["text"])]
        topic = str(message["topic"])
        if topic in self._warned or len(self._warned) >= _MAX_TOPICS:
            return []
        self._warned.add(topic)
        return [Notice("warning", message["text"], detail={"topic": topic})]
