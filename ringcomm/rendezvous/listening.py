"""Which members the rendezvous pings, and which have been silent for too long. Pure."""

from __future__ import annotations

from typing import Collection, List, Tuple

from ..clock import is_due
from .actions import Action, Send, Timer
from .membership import Member
from .root_cause import RootCause, silence

_PINGS = 6
"""Number of pings within the time after which a silent member counts as failed."""


def listen(members: Collection[Member], running: bool, now_s: float) -> Tuple[List[Action], List[RootCause]]:
    """Ping every member, unless one has not answered for too long; return the pings, and the root cause if
    there is one. ``running``: all members have been connected.

    While the job runs, ranks exchange heartbeats with each other. The rendezvous pings them while links are
    built, and when the first ranks have left: the last rank has no peer that would notice.
    """
    here = [item for item in members if item.is_here and item.dead_after_s]
    if not here:
        return [], []
    limit_s = min(member.dead_after_s for member in here)
    silent = min(here, key=lambda member: member.heard_s)
    if is_due(silent.heard_s + limit_s, now_s):
        when = "others have left already" if running else "links were being built"
        return [], [silence(silent, now_s - silent.heard_s, when)]
    return [*(Send(member.connection, {"type": "ping"}) for member in here), Timer(limit_s / _PINGS)], []


def census(members: Collection[Member]) -> List[Action]:
    """Ask every member from which peers it receives heartbeats, and from which it does not.

    After a loss all ranks report at the same time. A rank that has not answered yet is not asked again, or a
    thousand reports would have a thousand ranks answer a thousand times.
    """
    here = [item for item in members if item.is_here and not item.asked]
    for item in here:
        item.asked = True
    return [Send(item.connection, {"type": "ping"}) for item in here]
