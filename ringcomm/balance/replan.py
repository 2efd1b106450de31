"""When the shares of ranks change, and to what: a state machine fed with measurements of all ranks.

All ranks feed it with the same reports at the same step, so all come to the same decisions without a message.
"""

from __future__ import annotations

from statistics import fmean
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .plan import ComputeTime, ShareLimits, Shares, TimedShare, fit, plan_shares

WINDOWS = (4, 7, 20)  # steps of the first, the second and any later observation
MIN_GAIN = 0.10  # part by which the predicted step must be shorter, or shares stay
REFINING_GAIN = 0.03  # the same in the two decisions after the first: only then are there two sizes to fit to
PAUSE = 50  # fewest steps between two changes, after these
_LONGER = 1.10  # a change that makes steps this many times as long is reverted (not the first)
_CHANGED = 0.10  # distance of an observation from the model from which the rank counts as changed
_PROPORTIONAL = 0.2  # see plan.fit: first windows are short, and first changes small for some ranks
_SIZES_KEPT = 4
_EXCEPTIONAL = 3.0  # a step of this many times the mean of the others may be an exception
_EXCEPTIONS = 8  # one step in this many may be one, and one of any window
AHEAD = 2  # steps by which ranks may differ when they decide


class RankTimes(NamedTuple):
    """A rank's measurements since its last report."""

    samples: int  # its share of a full global batch
    compute_s: float  # per step, without waiting for other ranks; 0.0: not measured
    waited_s: float  # per step, in communication or for other ranks
    ahead: int  # most steps that its loader took in advance so far
    most: int = 0  # most samples that fit into its memory; 0: not known


class NewShares(NamedTuple):
    """New shares, and a text about the change for people."""

    lead: int  # steps from the decision until they apply
    shares: Shares
    text: str


def typical_s(times: Sequence[float]) -> float:
    """Return the mean seconds of the steps in a window without outliers: steps that compile or write a
    checkpoint. Not the median: a CPU quota makes single steps much shorter or longer than in the long run.

    >>> typical_s([0.05, 0.15, 0.05, 0.15, 9.0])
    0.1
    """
    kept = sorted(times)
    for _ in range(max(1, len(kept) // _EXCEPTIONS)):
        if len(kept) < 3 or kept[-1] <= _EXCEPTIONAL * fmean(kept[:-1]):
            break
        kept.pop()
    return fmean(kept) if kept else 0.0


def rank_names(hosts: Sequence[str]) -> List[str]:
    """Return a name for each rank: its host, with its rank if a host has several.

    >>> rank_names(["desk", "jetson1", "desk"])
    ['desk:0', 'jetson1', 'desk:2']
    """
    return [host if hosts.count(host) == 1 else f"{host}:{rank}" for rank, host in enumerate(hosts)]


class Replanner:
    """Model the speed of every rank, and decide about shares."""

    def __init__(self, shares: Shares, total: int, limits: ShareLimits, hosts: Sequence[str]) -> None:
        self.shares = shares
        self.window = WINDOWS[0]  # steps until the next reports
        self._total = total
        self._limits = limits
        self._hosts = list(hosts)
        self._observed: List[Dict[int, TimedShare]] = [{} for _ in shares]
        self._slower = [1.0 for _ in shares]  # factor by which each rank has become slower since the change
        self._doubted = [False for _ in shares]  # the last observation of a rank did not fit its model
        self._decisions = 0
        self._changed_at: Optional[int] = None
        self._before: Optional[Tuple[Shares, float]] = None  # of the last change, until it has been observed

    def decide(self, step: int, reports: Sequence[RankTimes]) -> Optional[NewShares]:
        """Take the reports of all ranks, in rank order; return new shares, or None to keep them.

        ``step`` counts from the start and must be the same on all ranks.
        """
        for rank, report in enumerate(reports):
            self._slower[rank] *= self._learn(rank, report)
        self._decisions += 1
        self.window = WINDOWS[min(self._decisions, len(WINDOWS) - 1)]
        known = [_fitted(observed) for observed in self._observed if observed]
        if not known:
            return None
        # A rank that has computed nothing yet counts as the fastest: otherwise it would never be measured.
        fastest = min(known, key=lambda speed: speed.compute_s(self._total))
        speeds = [_fitted(observed) if observed else fastest for observed in self._observed]
        exposed_s = max(0.0, min((r.waited_s for r in reports if r.compute_s), default=0.0))
        now_s = max(report.compute_s for report in reports) + exposed_s
        exceeded = self._learn_limits(reports)
        before, self._before = self._before, None
        if before is not None and not exceeded and now_s > _LONGER * before[1]:
            text = (
                f"steps became longer at step {step}, {before[1]:.3g} -> {now_s:.3g} s: "
                f"batches {_text(self.shares)} -> {_text(before[0])} again"
            )
            return self._change(step, reports, before[0], text)
        shares = plan_shares(speeds, self._total, self._limits)
        then_s = max(speed.compute_s(share) for speed, share in zip(speeds, shares)) + exposed_s
        refines = self._changed_at is not None and self._decisions <= 3
        early = self._changed_at is not None and not refines and step - self._changed_at < PAUSE
        pays = then_s < (1.0 - (REFINING_GAIN if refines else MIN_GAIN)) * now_s and not early
        if shares == self.shares or not (exceeded or pays):
            return None
        text = (
            f"{self._why(step, reports)}: batches {_text(self.shares)} -> {_text(shares)}, "
            f"step {now_s:.3g} -> {then_s:.3g} s predicted"
        )
        if self._changed_at is not None and not exceeded:
            self._before = self.shares, now_s
        return self._change(step, reports, shares, text)

    def _change(self, step: int, reports: Sequence[RankTimes], shares: Shares, text: str) -> NewShares:
        self.shares, self._changed_at = shares, step
        self._slower = [1.0 for _ in shares]
        return NewShares(max(report.ahead for report in reports) + AHEAD, shares, text)

    def _learn_limits(self, reports: Sequence[RankTimes]) -> bool:
        """Record the ranks' memory limits; return whether the shares exceed them."""
        most = list(self._limits.max_batch or [None] * len(reports))
        for rank, report in enumerate(reports):
            limit = most[rank]
            if report.most and (limit is None or report.most < limit):
                most[rank] = report.most
        self._limits = self._limits._replace(max_batch=tuple(most))
        return any(report.most and share > report.most for report, share in zip(reports, self.shares))

    def _learn(self, rank: int, report: RankTimes) -> float:
        """Update the model; return the factor by which the rank has become slower (1.0: as before)."""
        if report.compute_s <= 0.0 or report.samples <= 0:
            return 1.0
        observed, factor = self._observed[rank], 1.0
        if len(observed) > 1 or report.samples in observed:
            ratio = report.compute_s / _fitted(observed).compute_s(report.samples)
            changed = abs(ratio - 1.0) > _CHANGED
            doubted, self._doubted[rank] = self._doubted[rank], changed
            if changed and not doubted and self._decisions > 1:
                return 1.0  # its speed may have changed within the window: the next one shows how much
            if changed:
                factor, self._doubted[rank] = ratio, False
                for samples, item in observed.items():
                    observed[samples] = item._replace(compute_s=item.compute_s * factor)
        observed.pop(report.samples, None)
        observed[report.samples] = TimedShare(report.samples, report.compute_s, self.window)
        while len(observed) > _SIZES_KEPT:
            del observed[next(iter(observed))]
        return factor

    def _why(self, step: int, reports: Sequence[RankTimes]) -> str:
        """Return the reason of a change, such as ``jetson1 slowed to 0.6x at step 812``."""
        rank = max(range(len(reports)), key=lambda rank: abs(self._slower[rank] - 1.0))
        factor = self._slower[rank]
        if abs(factor - 1.0) <= _CHANGED:
            rank = max(range(len(reports)), key=lambda rank: reports[rank].compute_s)
            return f"{self._hosts[rank]} is the slowest at step {step}"
        verb = "slowed" if factor > 1.0 else "sped up"
        return f"{self._hosts[rank]} {verb} to {1.0 / factor:.2g}x at step {step}"


def _text(shares: Shares) -> str:
    return "/".join(map(str, shares))


def _fitted(observed: Dict[int, TimedShare]) -> ComputeTime:
    return fit(list(observed.values()), _PROPORTIONAL)
