"""A barrier that reports the ranks that do not reach it in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence, Union

import torch.distributed as dist

from ...clock import Deadline
from ...errors import PeerStalledError
from ...group.failures import GroupWatch
from ...group.point_to_point import PointToPoint
from ._work import RingcommWork

_OURS = 1  # owner of the barrier's tags: they do not match the user's messages


def monitored_barrier(
    group: Any = None, timeout: Union[timedelta, float, None] = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has called it; report the ranks that do not within a time limit.

    Replaces ``torch.distributed.monitored_barrier``, which accepts the Gloo backend only.

    Example: ``monitored_barrier(timeout=60, wait_all_ranks=True)``.

    Args:
        group: a process group of the backend ``"ringcomm"``; by default the default group.
        timeout: how long rank 0 waits for the other ranks: seconds, or a ``timedelta``; by default the
            group's timeout.
        wait_all_ranks: report all missing ranks, not only the first.

    Raises:
        PeerStalledError: (on every rank) a rank has not called it in time.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    chosen.monitored_barrier(limit, wait_all_ranks)


class MonitoredBarrier:
    """Every rank reports to rank 0, which waits for all reports and replies to each rank.

    ``post`` carries the reports, ``watch`` aborts the group if a rank is missing; ``ranks`` are ranks of the
    whole job.
    """

    def __init__(self, messages: PointToPoint, watch: GroupWatch, ranks: Sequence[int]) -> None:
        self._messages = messages
        self._watch = watch
        self._ranks = ranks

    def report(self, limit_s: float) -> None:
        """Run the barrier on a rank other than 0."""
        self._token(self._messages.send, 0, limit_s)
        # Longer than rank 0's limit, so that its error arrives first.
        self._token(self._messages.receive, 0, 2 * limit_s + 10.0).wait()

    def judge(self, limit_s: float, wait_all_ranks: bool) -> None:
        """Run the barrier on rank 0; PeerStalledError if a rank does not report within ``limit_s``.

        ``wait_all_ranks``: wait for all ranks even if one is missing.
        """
        deadline = Deadline(limit_s)
        missing: List[int] = []
        peers = range(1, len(self._ranks))
        reports = [(peer, self._token(self._messages.receive, peer, None)) for peer in peers]
        for peer, work in reports:
            if not work.is_completed() and missing and not wait_all_ranks:
                break
            try:
                work.wait(timedelta(seconds=max(1e-3, deadline.remaining_s())))
            except PeerStalledError:
                missing.append(peer)
        if missing:
            self._watch.report_lost(
                missing[0], "monitored_barrier", f"not there after {limit_s:g} s", "stalled"
            )
            several = "s" if len(missing) > 1 else ""
            names = ", ".join(str(self._ranks[peer]) for peer in missing)
            # Gloo's words: programs search for them.
            raise PeerStalledError(
                f"Rank {self._ranks[0]} timed out in monitoredBarrier after {limit_s:g} s: "
                f"Rank{several} {names} failed to pass monitoredBarrier in that time.",
                rank=self._ranks[missing[0]],
            )
        for work in [self._token(self._messages.send, peer, limit_s) for peer in peers]:
            work.wait()  # this rank may leave the group next

    def _token(self, act: Callable[..., None], peer: int, limit_s: Optional[float]) -> RingcommWork:
        work = RingcommWork("monitored_barrier", [])
        act(peer, (_OURS, 0), memoryview(bytearray(1)), work, limit_s)
        return work
