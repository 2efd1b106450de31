"""Which ranks have failed, and which are late. Pure state machines; inputs are messages and the time.

Every engine sends a heartbeat to every other one every few seconds, with how far it is in its calls. A
process that is stopped, swapped out, cut off, or inside a C call that keeps the interpreter lock does not. A
process that computes, waits or is in a debugger does: it is late, not failed.
"""

from __future__ import annotations

from typing import Collection, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ..collective.observe import Progress
from .mismatch import ranks_text

BEATS = 6
"""Number of heartbeats in the time without any after which a peer counts as failed."""
MAX_INTERVAL_S = 5.0
"""Heartbeats are sent at least this often, in seconds, unless no limit depends on them."""
CALLS, ENGINE = 0, 1
"""The channels that reports are about."""


class SilenceLimits(NamedTuple):
    """How long others may be silent, in seconds; 0: for ever.

    ``dead_after_s``: without a heartbeat or in a transfer that stands still. ``warning_s`` and
    ``late_after_s``: with a rank whose program does not come, before saying so and before giving it up.
    """

    dead_after_s: float = 0.0
    warning_s: float = 0.0
    late_after_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """How often to give heartbeats, so that none of the limits is missed by much."""
        limits_s = [limit_s / BEATS for limit_s in self if limit_s]
        return min(MAX_INTERVAL_S, *limits_s) if limits_s else 3600.0


class FailureDetector:
    """Heartbeats: arrivals go in; failed peers and due heartbeats come out.

    A peer fails after ``dead_after_s`` without a heartbeat; 0: never. Times are in seconds.
    """

    def __init__(self, peers: Iterable[int], dead_after_s: float, interval_s: float, now_s: float) -> None:
        self.interval_s = interval_s
        self._dead_after_s = dead_after_s
        self._heard_s: Dict[int, float] = dict.fromkeys(peers, now_s)
        self._sent_s = now_s
        self._looked_s = now_s

    def received(self, peer: int, now_s: float) -> None:
        """A message or heartbeat has arrived from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def left(self, peer: int) -> None:
        """The link to a peer has ended; no heartbeat is expected of it any more."""
        self._heard_s.pop(peer, None)

    def due(self, now_s: float) -> bool:
        """Return whether a heartbeat is due; if so, the caller sends it now."""
        if now_s - self._sent_s < self.interval_s:
            return False
        self._sent_s = now_s
        return True

    def silent(self, now_s: float) -> Optional[Tuple[int, float]]:
        """The peer without a heartbeat for longest, and that time in seconds, if that is too long."""
        if not self._dead_after_s:
            return None
        if now_s - self._looked_s > self._dead_after_s / 3:
            # This process did not run: heartbeats that arrived meanwhile are still in the sockets' buffers.
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        if not self._heard_s:
            return None
        peer, heard_s = min(self._heard_s.items(), key=lambda item: item[1])
        return (peer, now_s - heard_s) if now_s - heard_s >= self._dead_after_s else None

    def divided(self, now_s: float) -> Tuple[List[int], List[int]]:
        """(peers with a heartbeat within half the limit, peers without one)."""
        all_heard_s = dict(self._heard_s)  # a copy, because another thread may ask
        heard = {peer for peer, at_s in all_heard_s.items() if now_s - at_s <= self._dead_after_s / 2}
        return sorted(heard), sorted(set(all_heard_s) - heard)

    def alarm_s(self, now_s: float) -> float:
        """In how many seconds a heartbeat or the next check is due."""
        at_s = self._sent_s + self.interval_s
        if self._dead_after_s and self._heard_s:
            at_s = min(at_s, min(self._heard_s.values()) + self._dead_after_s)
        return max(0.0, min(at_s - now_s, self.interval_s))


class Late(NamedTuple):
    """Ranks that have not entered a call in which others wait, as a text, too."""

    ranks: List[int]
    text: str
    given_up: bool


class _Known:
    """A rank's last report about one channel, and since when nothing in it has moved."""

    __slots__ = ("progress", "since_s")

    def __init__(self, progress: Progress, since_s: float) -> None:
        self.progress = progress
        self.since_s = since_s


class ProgressReports:
    """How far all ranks are: which transfer makes no progress, and which ranks have not entered a call.

    The ranks are alive: their heartbeats arrive.
    """

    def __init__(self, rank: int, hosts: Sequence[str], limits: SilenceLimits) -> None:
        self._rank = rank
        self._hosts = hosts
        self._limits = limits
        self._known: Tuple[Dict[int, _Known], Dict[int, _Known]] = ({}, {})
        self._look_s = 0.0
        self._behind_before: List[int] = []
        self._waited_since_s = self._warned_s = 0.0

    def report(self, rank: int, channel: int, progress: Progress, now_s: float) -> None:
        """Take a rank's report."""
        known = self._known[channel].get(rank)
        if known is None or known.progress[:3] != progress[:3]:
            self._known[channel][rank] = _Known(progress, now_s)
        else:
            known.progress = progress

    # ---- transfers that stand still ----------------------------------------------------------

    def stuck(self, now_s: float) -> Optional[Tuple[int, str]]:
        """A peer to which this rank's transfer stands still although both are at it, and why that is so."""
        limit_s = self._limits.dead_after_s
        for known in self._known if limit_s else ():
            mine = known.get(self._rank)
            if mine is None or not mine.progress.doing or now_s - mine.since_s < limit_s:
                continue
            for peer in mine.progress.waits_for:
                theirs = known.get(peer)
                if theirs is None or now_s - theirs.since_s < limit_s:
                    continue
                what = self._between(mine.progress, theirs.progress, peer)
                if what:
                    return peer, (
                        f"the transfer stands still: not a byte has moved for {now_s - mine.since_s:.0f} s, "
                        f"{mine.progress.moved_bytes} bytes into {mine.progress.doing}, although {what} "
                        "(RINGCOMM_DEAD_AFTER sets the limit)"
                    )
        return None

    def _between(self, mine: Progress, theirs: Progress, peer: int) -> str:
        """Why only the link between two ranks can be what the first one waits for; empty: it may be more.

        That both wait for each other is not enough: each may need what a third one does not get.
        """
        if theirs.sequence == mine.sequence and theirs.doing:
            on_their_way = theirs.with_peer(self._rank)[0] - mine.with_peer(peer)[1]
            return f"{on_their_way} bytes are on their way" if on_their_way > 0 else ""
        if theirs.sequence >= mine.sequence:
            return "the other has sent its part and is through with it"
        return ""

    # ---- late ranks --------------------------------------------------------------------------

    def late(self, paused: Collection[int], now_s: float) -> Optional[Late]:
        """The ranks that have not entered a direct call, if a warning or the end of the wait is due."""
        if now_s < self._look_s:
            return None
        self._look_s = now_s + self._limits.interval_s
        warning_s, late_after_s = self._limits.warning_s, self._limits.late_after_s
        calls = {rank: known.progress for rank, known in self._known[CALLS].items()}
        waiting = sorted(rank for rank, item in calls.items() if item.doing)
        behind = _behind(calls)
        excused = any(rank in paused for rank in behind)
        if not waiting or not behind or behind != self._behind_before or excused:
            self._behind_before = behind
            self._waited_since_s = self._warned_s = now_s
            return None
        waited_s = now_s - self._waited_since_s
        given_up = bool(late_after_s) and waited_s >= late_after_s
        if not given_up and not (warning_s and now_s - self._warned_s >= warning_s):
            return None
        self._warned_s = now_s
        text = (
            f"{calls[waiting[0]].doing}, call number {calls[waiting[0]].number}, has waited for "
            f"{waited_s:.0f} s on {ranks_text(waiting, self._hosts)} for {ranks_text(behind, self._hosts)}"
        )
        return Late(behind, text, given_up)


def _behind(calls: Dict[int, Progress]) -> List[int]:
    """The ranks whose programs have to make the next call, unless a slow transfer comes before that."""
    first = min((item.sequence for item in calls.values()), default=0)
    last = max((item.sequence for item in calls.values()), default=0)
    ranks = sorted(rank for rank, item in calls.items() if item.sequence == first)
    return [] if first == last or any(calls[rank].doing for rank in ranks) else ranks
