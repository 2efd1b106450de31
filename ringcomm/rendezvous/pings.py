"""Pings to the processes of an elastic job that no peer monitors. Pure."""

from __future__ import annotations

import math
from typing import List, Optional

from ..clock import is_due
from .actions import Action, Send, Timer
from .processes import Process, Processes, Stage

_PER_LIMIT = 6
"""Number of pings within the time after which a silent process counts as failed."""
_MAX_INTERVAL_S = 5.0


class Pings:
    """Decides when to ping, and which processes have not answered for too long.

    All processes that wait are pinged, and the members of a view unless it is being set up: then its epoch
    does that.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._at_s: Optional[float] = None

    def _pinged(self, is_linking: bool) -> List[Process]:
        return self._processes.among(Stage.WAITING, *([] if is_linking else [Stage.IN_VIEW]))

    def keep_up(self, is_linking: bool, now_s: float) -> List[Action]:
        """Ping the processes, unless the last pings are recent. ``is_linking``: the view is being set up."""
        if self._at_s is not None:
            return []
        processes = self._pinged(is_linking)
        if not processes:
            return []
        limits_s = (item.dead_after_s / _PER_LIMIT or math.inf for item in processes)
        interval_s = min(_MAX_INTERVAL_S, *limits_s)
        self._at_s = now_s + interval_s
        return [*(Send(item.connection, {"type": "ping"}) for item in processes), Timer(interval_s)]

    def silent(self, is_linking: bool, is_running: bool, now_s: float) -> List[Process]:
        """Return the processes that have not answered for too long, if it is time to ping again. While a view
        runs (``is_running``) its members monitor each other; only if none of them answers any more, no member
        can report that.
        """
        if self._at_s is None or not is_due(self._at_s, now_s):
            return []
        self._at_s = None
        limits = [(item, item.dead_after_s) for item in self._pinged(is_linking)]
        silent = [item for item, limit_s in limits if limit_s and now_s - item.heard_s >= limit_s]
        members = self._processes.among(Stage.IN_VIEW)
        if is_running and not set(members) <= set(silent):
            silent = [item for item in silent if item not in members]
        return silent
