"""Progress reports of ranks: which transfer makes no progress, and which ranks have not entered a call.

The ranks are alive: their heartbeats arrive. A pure state machine; its inputs are reports and the time.
"""

from __future__ import annotations

from typing import Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..collective.progress import Progress
from .mismatch import ranks_text

CALLS, ENGINE = 0, 1
"""The channels that reports are about."""


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
    """The progress of all ranks. Limits are in seconds; 0: never."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        dead_after_s: float,
        warning_s: float,
        late_after_s: float,
        interval_s: float,
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._dead_after_s = dead_after_s
        self._warning_s = warning_s
        self._late_after_s = late_after_s
        self._interval_s = interval_s
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
        if not self._dead_after_s:
            return None
        for channel in (CALLS, ENGINE):
            mine = self._known[channel].get(self._rank)
            if mine is None or not mine.progress.doing or now_s - mine.since_s < self._dead_after_s:
                continue
            for peer in mine.progress.waits_for:
                theirs = self._known[channel].get(peer)
                if theirs is None or now_s - theirs.since_s < self._dead_after_s:
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
        self._look_s = now_s + self._interval_s
        calls = {rank: known.progress for rank, known in self._known[CALLS].items()}
        waiting = sorted(rank for rank, item in calls.items() if item.doing)
        behind = self._behind(calls)
        excused = any(rank in paused for rank in behind)
        if not waiting or not behind or behind != self._behind_before or excused:
            self._behind_before = behind
            self._waited_since_s = self._warned_s = now_s
            return None
        waited_s = now_s - self._waited_since_s
        given_up = bool(self._late_after_s) and waited_s >= self._late_after_s
        if not given_up and not (self._warning_s and now_s - self._warned_s >= self._warning_s):
            return None
        self._warned_s = now_s
        text = (
            f"{calls[waiting[0]].doing}, call number {calls[waiting[0]].number}, has waited for "
            f"{waited_s:.0f} s on {ranks_text(waiting, self._hosts)} for {ranks_text(behind, self._hosts)}"
        )
        return Late(behind, text, given_up)

    def _behind(self, calls: Dict[int, Progress]) -> List[int]:
        """The ranks whose programs have to make the next call, unless a slow transfer comes before that."""
        first = min((item.sequence for item in calls.values()), default=0)
        last = max((item.sequence for item in calls.values()), default=0)
        ranks = sorted(rank for rank, item in calls.items() if item.sequence == first)
        if first == last or any(calls[rank].doing for rank in ranks):
            return []
        return ranks
