"""A barrier that tells who does not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence, Union

import torch.distributed as dist

from ...clock import Deadline
from ...errors import PeerStalledError
from ...group.abort_watch import GroupWatch
from ._post import PostOffice
from ._work import RingcommWork

_OURS = 1
"""Marks messages between groups, so that a user's with the same tag are others."""


def monitored_barrier(
    group: Any = None, timeout: Union[timedelta, float, None] = None, wait_all_ranks: bool = False
) -> None:
    """What ``torch.distributed.monitored_barrier`` is for Gloo, which refuses all other backends by name.

    Args:
        group: of this backend; the default group if none is given.
        timeout: how long rank 0 waits for the others; the group's if none is given.
        wait_all_ranks: name all that are missing, not only the first.

    Raises:
        PeerStalledError: somebody has not come in time.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    chosen.monitored_barrier(limit, wait_all_ranks)


class MonitoredBarrier:
    """The two halves of it: everybody reports to rank 0, which judges, and then tells the others.

    Args:
        post: carries the reports.
        watch: is told who is missing.
        ranks: the group's members, as the whole job numbers them.
    """

    def __init__(self, post: PostOffice, watch: GroupWatch, ranks: Sequence[int]) -> None:
        self._post = post
        self._watch = watch
        self._ranks = ranks

    def report(self, limit_s: float) -> None:
        """What ranks other than 0 do."""
        self._token(self._post.send, 0, limit_s)
        # Rank 0 judges first, and everybody hears of it.
        self._token(self._post.receive, 0, 2 * limit_s + 10.0).wait()

    def judge(self, limit_s: float, wait_all_ranks: bool) -> None:
        """What rank 0 does.

        Raises:
            PeerStalledError: somebody has not come in time.
        """
        deadline = Deadline(limit_s)
        missing: List[int] = []
        here = [(peer, self._token(self._post.receive, peer, None)) for peer in range(1, len(self._ranks))]
        for peer, work in here:
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
            # The words that Gloo has for it: people and programs look for them.
            raise PeerStalledError(
                f"Rank {self._ranks[0]} timed out in monitoredBarrier after {limit_s:g} s: "
                f"Rank{several} {names} failed to pass monitoredBarrier in that time.",
                rank=self._ranks[missing[0]],
            )
        for peer, _ in here:
            self._token(self._post.send, peer, limit_s)

    def _token(self, act: Callable[..., None], peer: int, limit_s: Optional[float]) -> RingcommWork:
        work = RingcommWork("monitored_barrier", [])
        act(peer, (_OURS, 0), memoryview(bytearray(1)), work, limit_s)
        return work
