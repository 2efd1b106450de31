"""Changes of the membership of an elastic job, reported to a rank while its program computes."""

from __future__ import annotations

import logging
import threading
from typing import Callable, List, Optional, Tuple

from ..wire.messages import Message
from .joining import ADDED

logger = logging.getLogger("ringcomm.rendezvous")

Listener = Callable[[int, bool], None]
"""Takes changes of the membership as bits (1: processes leave, 2: join), and whether they are ready now."""


class Changes:
    """The reported changes, and the listener of the program that is called for each."""

    def __init__(self, rank: int, reported: int) -> None:
        self._rank = rank
        self._reported = reported
        self._heard: List[Tuple[int, bool]] = []
        self._listener: Optional[Listener] = None
        self._lock = threading.Lock()
        self._delivering = threading.RLock()

    def reported(self, message: Message) -> None:
        """Take a message: members must ask for the next view, or a process is being started."""
        with self._lock:
            if message["type"] == "updated":
                self._reported |= int(message["change"])
                self._heard.append((int(message["change"]), True))
            else:
                self._heard.append((ADDED, False))

    def take(self) -> int:
        """Return the changes since the last call; see :meth:`.ControlChannel.take_changes`."""
        with self._lock:
            changes, self._reported = self._reported, 0
        return changes

    def listen(self, listener: Optional[Listener]) -> None:
        """Set the function called for each change; see :meth:`.ControlChannel.on_changes`."""
        with self._delivering:
            self._listener = listener
            with self._lock:
                changes, self._heard = self._reported, []
            if changes:
                self._call(changes, True)

    def deliver(self) -> None:
        """Call the listener for the reported changes. It runs code of the program: hold no lock."""
        with self._delivering:
            with self._lock:
                heard, self._heard = self._heard, []
            for change, ready in heard:
                self._call(change, ready)

    def _call(self, change: int, ready: bool) -> None:
        if self._listener is None:
            return
        try:
            self._listener(change, ready)
        except Exception:  # noqa: BLE001  code of the program; without this thread the rank would be lost
            logger.exception("on_hosts_updated() failed on rank %d; training goes on.", self._rank)
