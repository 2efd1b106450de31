"""Entries that ranks post at their job's rendezvous for each other. Pure.

Process groups of other libraries use them: one rank serves a rendezvous for the group and posts its address.
"""

from __future__ import annotations

from typing import Dict, List, Set

from ..errors import ProtocolError
from ..wire.messages import Message
from .actions import Send

MAX_ENTRIES = 10_000
MAX_ENTRY_BYTES = 64 * 1024


class Board:
    """The posted entries, and which connections wait for which entries."""

    def __init__(self) -> None:
        self._entries: Dict[str, str] = {}
        self._waiting: Dict[str, Set[int]] = {}

    def posted(self, connection: int, message: Message) -> List[Send]:
        """Post an entry, and send it to the connections that wait for it. Raises ProtocolError if there are
        too many entries, or this one is too long.
        """
        entry, text = message["entry"], message["text"]
        if len(entry) + len(text) > MAX_ENTRY_BYTES or len(self._entries) >= MAX_ENTRIES:
            raise ProtocolError("an entry that is too long, or one too many")
        self._entries[entry] = text
        waiting = sorted(self._waiting.pop(entry, ()))
        own = _entry_message(connection, entry, text)
        return [own, *(_entry_message(number, entry, text) for number in waiting)]

    def awaited(self, connection: int, message: Message) -> List[Send]:
        """Send an entry now, or when it is posted. Raises ProtocolError if ranks wait for too many."""
        entry = message["entry"]
        if entry in self._entries:
            return [_entry_message(connection, entry, self._entries[entry])]
        if len(self._waiting) >= MAX_ENTRIES:
            raise ProtocolError("ranks wait for too many entries")
        self._waiting.setdefault(entry, set()).add(connection)
        return []

    def left(self, connection: int) -> None:
        """Forget a connection that has ended."""
        for entry in [entry for entry, waiting in self._waiting.items() if connection in waiting]:
            self._waiting[entry].discard(connection)
            if not self._waiting[entry]:
                del self._waiting[entry]


def _entry_message(connection: int, entry: str, text: str) -> Send:
    return Send(connection, {"type": "entry", "entry": entry, "text": text})
