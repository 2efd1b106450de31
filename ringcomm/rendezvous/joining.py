"""Decides when the members of a view are asked to take in waiting processes. Pure."""

from __future__ import annotations

from typing import List, Optional

from ..clock import is_due
from .actions import Action, Seat, Send, Timer
from .processes import Process, Processes, Stage

ADDED, REMOVED = 2, 1
"""Changes of the membership, as bits: as in Horovod's ``HostUpdateResult``."""
TOGETHER_S = 30.0
"""How long a process waits at most for those that were started with it on its host. The members continue."""


class Joining:
    """Informs the members of a view about processes that join or leave."""

    def __init__(self, processes: Processes, most: int) -> None:
        self._processes = processes
        self._most = most
        self.held = False  # processes wait for others of their host, before the members are asked

    def expect(self, number: int, place: Seat) -> List[Action]:
        """Tell the members, which continue, that a process is about to be started."""
        self._processes.expected[number] = place
        return [Send(item.connection, {"type": "announced"}) for item in self._processes.among(Stage.IN_VIEW)]

    def ask(self, change: int) -> List[Action]:
        """Ask the members to come to the next view at the next boundary between steps."""
        message = {"type": "updated", "change": change}
        return [Send(item.connection, message) for item in self._processes.among(Stage.IN_VIEW)]

    def invite(self, size: int, now_s: float) -> List[Action]:
        """Ask the members to take in the waiting processes, now or later. ``size``: of the running view."""
        rest_s = self._rest_s(now_s) if size < self._most else None
        self.held = bool(rest_s)
        if rest_s is None:
            return []
        return [Timer(rest_s)] if rest_s else self.ask(ADDED)

    def _rest_s(self, now_s: float) -> Optional[float]:
        """Return the seconds until the members must be asked; None if nothing waits.

        Processes of one host are ready at different moments, and each change of the view costs all members a
        pause. So the first ones wait for the others of their host, unless these have ended.
        """
        missing = {place.host for _, place in self._processes.missing()}
        waiting = self._processes.among(Stage.WAITING)
        rests_s = [_rest_s(item, now_s) if item.host in missing else 0.0 for item in waiting]
        return min(rests_s, default=None)


def _rest_s(process: Process, now_s: float) -> float:
    last_s = process.asked_s + TOGETHER_S
    return last_s - now_s if process.is_new and not is_due(last_s, now_s) else 0.0
