"""Decides whether the next view of an elastic job can be published, and which processes are in it."""

from __future__ import annotations

from enum import Enum
from typing import FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import is_due
from ..configuration.limits import Limits
from ..group.view import NO_VIEW, View, rank_order
from .processes import Process, Processes, Stage, names


class Step(Enum):
    """What is to happen now that no member of the last view is in it any more."""

    PUBLISH = "publish"
    WAIT = "wait"
    FAIL = "fail"
    END = "end"


class Decision(NamedTuple):
    """What is to happen.

    Attributes:
        step: of which kind.
        order: to publish: member numbers in rank order.
        text: to wait or to fail: why.
        kind: to fail: the kind of failure.
        size: to wait: how many processes there are.
        is_new: to wait: whether the wait has just begun.
    """

    step: Step
    order: Tuple[int, ...] = ()
    text: str = ""
    kind: str = ""
    size: int = 0
    is_new: bool = False


class NextView:
    """Collects the processes that are ready.

    Args:
        limits: of the job.
        processes: of the job.
        launched: whether a launcher announces processes.
        start_timeout_s: how long the first view waits for all processes, in seconds.
    """

    def __init__(self, limits: Limits, processes: Processes, launched: bool, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._limits = limits
        self._processes = processes
        self._launched = launched
        self._since_s: Optional[float] = None
        self._newest = 0

    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide, after every member of the last view has asked for the next one or has ended.

        Args:
            last: the last view.
            refused_connections: the connections that failed to authenticate, as text.
            now_s: the time on the rendezvous' monotonic clock.
        """
        if last is NO_VIEW and self._too_early(now_s):
            return Decision(Step.WAIT)
        waiting = self._processes.among(Stage.WAITING)
        if last is not NO_VIEW and all(item.is_new for item in waiting):
            return self._no_survivor(last)
        if not waiting:
            self._since_s = None
            return Decision(Step.WAIT)
        is_new = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        limits = self._limits
        order = rank_order([item.candidate() for item in waiting], limits.most)
        # Once a member has finished, the others need not wait for new processes.
        enough = len(order) >= limits.min_np or self._finished(last)
        if not enough and is_due(since_s + limits.timeout_s, now_s):
            within = f"within {limits.timeout_s:g} s (--elastic-timeout)"
            return self._fail(
                "timeout", f"Not enough ranks {within}: {self._text(len(order), refused_connections)}."
            )
        if not enough or not self._complete(last, len(order), now_s - since_s):
            text = self._text(len(order), refused_connections)
            return Decision(Step.WAIT, text=text, size=len(order), is_new=is_new)
        return self._checked(last, order, waiting)

    def _too_early(self, now_s: float) -> bool:
        """Whether more processes surely join before the first view, so that there is no need to look closer.

        This is asked whenever one joins.
        """
        size, limits = self._processes.count(Stage.WAITING), self._limits
        if not size or self._since_s is None or size >= limits.most:
            return False
        if is_due(self._since_s + min(self._start_timeout_s, limits.timeout_s), now_s):
            return False
        return self._processes.some_are_missing if self._launched else size < limits.start_np

    def _checked(self, last: View, order: Tuple[int, ...], waiting: List[Process]) -> Decision:
        """Publish a view with enough ranks, unless the job must not go on with it."""
        limit = self._limits.reset_limit
        if limit is not None and last.epoch >= limit:
            text = f"Horovod was shutdown because number of resets during elastic job exceeded limit: {limit}"
            return self._fail("reset_limit", text)
        newest = max(item.candidate().position for item in waiting)
        if self._newest and not newest:
            text = f"No process that has a state is left after epoch {last.epoch}, only new ones are."
            return self._fail("lost", text)
        self._newest, self._since_s = newest, None
        return Decision(Step.PUBLISH, order)

    def _no_survivor(self, last: View) -> Decision:
        """No member of the last view goes on: they have finished, or all are lost."""
        if self._finished(last):
            return Decision(Step.END)
        lost = [item for item in self._processes.among(Stage.LOST) if item.number in last.numbers]
        why = "; ".join(f"{names([item])}: {item.why_lost}" for item in lost)
        return self._fail(
            "lost", f"No rank of epoch {last.epoch} is left, and its state is lost with them. {why}"
        )

    def _fail(self, kind: str, text: str) -> Decision:
        return Decision(Step.FAIL, text=text, kind=kind)

    def _finished(self, last: View) -> bool:
        """Return whether a member of the last view has finished."""
        return any(item.number in last.numbers for item in self._processes.among(Stage.LEFT))

    def _complete(self, last: View, size: int, waited_s: float) -> bool:
        """Return whether the first view has all processes that it waits for; later ones wait for none."""
        if last is not NO_VIEW or size >= self._limits.most:
            return True
        if is_due(self._start_timeout_s, waited_s):
            return True
        return not self._processes.missing() if self._launched else size >= self._limits.start_np

    def _text(self, size: int, refused_connections: str) -> str:
        missing = ", ".join(place.host for _, place in self._processes.missing())
        return (
            f"{size} of at least {self._limits.min_np} ranks are ready"
            + (f"; missing: {missing}" if missing else "")
            + (f". The rendezvous turned away {refused_connections}" if refused_connections else "")
        )


class Cuts:
    """Decides which process is left out if two of them cannot reach each other."""

    def __init__(self) -> None:
        self._last: FrozenSet[int] = frozenset()

    def left_out(self, apart: Sequence[Process], may_heal: bool, before: View) -> List[Process]:
        """Of the processes without a link between them, the one that is left out, if any.

        Args:
            apart: processes that do not reach each other.
            may_heal: whether the link has worked, and may work again: then one is left out only if it is cut
                in two epochs, one after the other.
            before: the view before the one that has failed; new processes are left out first.
        """
        numbers = frozenset(item.number for item in apart)
        again, self._last = numbers & self._last, numbers
        if len(apart) < 2 or (may_heal and not again):
            return []
        return [max(apart, key=lambda item: (item.number not in before.numbers, item.rank))]
