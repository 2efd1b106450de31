"""Pings to the processes of an elastic job that no peer monitors. Pure."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence

from ..clock import is_due
from .actions import Action, Send, Timer
from .processes import Process

_PER_LIMIT = 6
"""How many pings a process gets within the time after which a silent one counts as failed."""
_MAX_INTERVAL_S = 5.0


class Pings:
    """Decides when to ping, and which processes have not answered for too long."""

    def __init__(self) -> None:
        self._at_s: Optional[float] = None

    def keep_up(self, processes: Sequence[Process], now_s: float) -> List[Action]:
        """Ping these processes, unless the last pings are recent.

        Args:
            processes: all that are to be pinged.
            now_s: the time on the rendezvous' monotonic clock.
        """
        if self._at_s is not None or not processes:
            return []
        limits_s = (item.dead_after_s / _PER_LIMIT or math.inf for item in processes)
        interval_s = min(_MAX_INTERVAL_S, *limits_s)
        self._at_s = now_s + interval_s
        return [*(Send(item.connection, {"type": "ping"}) for item in processes), Timer(interval_s)]

    @property
    def recent(self) -> bool:
        """Whether the last pings are so recent that none are due."""
        return self._at_s is not None

    def silent(self, processes: Sequence[Process], now_s: float) -> List[Process]:
        """Those that have not answered for too long, if it is time to ping again.

        Args:
            processes: all that are pinged.
            now_s: the time on the rendezvous' monotonic clock.
        """
        if self._at_s is None or not is_due(self._at_s, now_s):
            return []
        self._at_s = None
        return [item for item in processes if item.dead_after_s and now_s - item.heard_s >= item.dead_after_s]
