"""Reports of an elastic rendezvous to the launcher about processes, losses and new views. Pure."""

from __future__ import annotations

from typing import Any, Collection, Dict, Iterable, Optional

from ..configuration.limits import Limits
from ..group.view import View
from .actions import Notice
from .membership import Member
from .processes import Process
from .terms import Decision


def ready_notice(process: Process, waiting: int) -> Notice:
    """Report a new process, and the number of processes that wait for the next view."""
    detail = {"member": process.number, "host": process.host, "waiting": waiting}
    return Notice("joined", f"a process on {process.host} is ready ({waiting} waiting)", detail=detail)


def waiting_notice(decision: Decision, limits: Limits) -> Notice:
    """Report that there are too few processes for the next view."""
    detail = {"size": decision.size, "min_size": limits.min_np, "timeout_s": limits.timeout_s}
    text = f"{decision.text}; waiting for up to {limits.timeout_s:g} s"
    return Notice("waiting", text, detail=detail)


def lost_notice(notice: Notice, epoch: int, culprit: Optional[Process]) -> Notice:
    """Report the end of an epoch. ``notice`` is the epoch's own report."""
    detail: Dict[str, Any] = {
        "epoch": epoch, "kind": str(notice.detail["kind"]), "rank": notice.culprit,
        "member": None if culprit is None else culprit.number,
        "host": None if culprit is None else culprit.host,
    }  # fmt: skip
    return Notice("lost", notice.text, culprit=notice.culprit, detail=detail)


def view_notice(
    notice: Notice,
    view: View,
    before: View,
    members: Iterable[Member],
    left: Collection[int],
    pause_s: Optional[float],
) -> Notice:
    """Report the start of an epoch. ``notice`` is the epoch's own report; ``left`` are members that ended
    without an error; ``pause_s`` is how long the members of the last view have waited.
    """
    gone = [item.number for item in view.lost(before)]
    detail: Dict[str, Any] = {
        "epoch": view.epoch,
        "members": [
            {**item.describe(), "slot": None if item.slot is None else list(item.slot)} for item in members
        ],
        "joined": [item.number for item in view.joined(before)],
        "lost": [number for number in gone if number not in left],
        "left": [number for number in gone if number in left],
        "pause_s": pause_s or 0.0, "table": notice.text, "links": notice.detail["links"],
    }  # fmt: skip
    text = f"{view.size} rank{'' if view.size == 1 else 's'}"
    if pause_s is not None:
        text = f"going on with {text} after {pause_s:.1f} s"
    return Notice("view", text, detail=detail)
