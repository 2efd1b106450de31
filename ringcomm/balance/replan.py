"""When the shares of ranks change, and to what: a state machine fed with measurements of all ranks.

All ranks feed it with the same reports at the same step, so all come to the same decisions without a message.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .plan import ComputeTime, ShareLimits, Shares, TimedShare, fit, plan_shares, spread_of

WINDOW = 20  # steps of one observation
FIRST_WINDOW = 4  # steps of the first observation, for the first model
SECOND_WINDOW = 7  # steps of the second one: its change applies by step 20 without a loader
MIN_GAIN = 0.10  # part by which the predicted step must be shorter, or shares stay
# Gains and relative differences of ranks' times that let the decisions right after the first change refine it
# at once: only now are there two batch sizes to fit models to.
REFINEMENTS = ((0.03, 0.06), (MIN_GAIN, 0.10))
PAUSE = 50  # fewest steps between two changes, after the first one and its refinements
_LONGER = 1.10  # a change that makes steps this many times as long is reverted (not the first)
_MAX_CAUTION = 4
_CHANGED = 0.10  # distance of an observation from the model from which the rank counts as changed
_PROPORTIONAL = 0.2  # see plan.fit: first windows are short, and first changes small for some ranks
_SIZES_KEPT = 4
_STEPS_KEPT = 2 * WINDOW  # the weight of an observation that was made repeatedly
_MARGIN = 2  # steps by which ranks may differ when they decide


class RankTimes(NamedTuple):
    """A rank's measurements since its last report."""

    samples: int  # its share of a full global batch
    compute_s: float  # per step, without waiting for other ranks; 0.0: not measured
    waited_s: float  # per step, in communication or for other ranks
    ahead: int  # most steps that its loader took in advance so far
    most: int = 0  # most samples that fit into its memory; 0: not known


class Promise(NamedTuple):
    """The expected gain of a change, to be compared with the next observation."""

    shares: Shares  # before the change
    before_s: float  # seconds per step with them
    after_s: float  # predicted seconds per step with the new ones


class NewShares(NamedTuple):
    """New shares, and a text about the change for people."""

    lead: int  # steps from the decision until they apply
    shares: Shares
    text: str


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
        self.window = FIRST_WINDOW
        self.changes = 0
        self._total = total
        self._limits = limits
        self._hosts = list(hosts)
        self._observed: List[Dict[int, TimedShare]] = [{} for _ in shares]
        self._decisions = 0
        self._refinements: List[Tuple[float, float]] = []
        self._changed_at = -PAUSE
        self._slower = [1.0 for _ in shares]
        self._promise: Optional[Promise] = None
        self._caution = 1

    @property
    def speeds(self) -> List[Optional[ComputeTime]]:
        """Return the model of each rank; None: not measured yet."""
        return [_fitted(observed) if observed else None for observed in self._observed]

    def decide(self, step: int, reports: Sequence[RankTimes]) -> Optional[NewShares]:
        """Take the reports of all ranks, in rank order; return new shares, or None to keep them.

        ``step`` counts from the start and must be the same on all ranks.
        """
        self._decisions += 1
        measured_steps, self.window = self.window, SECOND_WINDOW if self._decisions == 1 else WINDOW
        bounded = self._learn_limits(reports)
        for rank, report in enumerate(reports):
            self._slower[rank] *= self._learn(rank, report, measured_steps)
        known = [speed for speed in self.speeds if speed is not None]
        if not known:
            return None
        # A rank that has computed nothing yet counts as the fastest: otherwise it would never be measured.
        fastest = min(known, key=lambda speed: speed.compute_s(self._total))
        speeds = [fastest if speed is None else speed for speed in self.speeds]
        exposed_s = max(0.0, min((r.waited_s for r in reports if r.compute_s), default=0.0))
        now_s = max(report.compute_s for report in reports) + exposed_s
        promise, self._promise = self._promise, None
        refinement = self._refinements.pop(0) if self._refinements else None
        if promise is not None and not bounded and self._is_broken(promise, now_s):
            return self._take_back(step, promise, now_s, reports)
        shares = plan_shares(speeds, self._total, self._limits)
        then = [speed.compute_s(share) for speed, share in zip(speeds, shares)]
        then_s = max(then) + exposed_s
        spreads = spread_of([report.compute_s for report in reports]), spread_of(then)
        if shares == self.shares or not (bounded or self._pays(step, refinement, spreads, now_s, then_s)):
            return None
        text = self._text(step, reports, shares, now_s, then_s)
        if self.changes and not bounded:
            self._promise = Promise(self.shares, now_s, then_s)
        if not self.changes:
            self._refinements = list(REFINEMENTS)
        return self._change(step, reports, shares, text)

    def _pays(
        self,
        step: int,
        refinement: Optional[Tuple[float, float]],
        spreads: Tuple[float, float],
        now_s: float,
        then_s: float,
    ) -> bool:
        """Return whether new shares are worth a change, by measured and predicted spreads and steps."""
        if refinement is not None:
            least_gain, uneven = refinement
            spread, after = spreads
            return then_s < (1.0 - least_gain) * now_s or (spread > uneven and after < spread / 2)
        if step - self._changed_at < self._caution * PAUSE:
            return False
        return then_s < (1.0 - self._caution * MIN_GAIN) * now_s

    def _is_broken(self, promise: Promise, now_s: float) -> bool:
        """Return whether a change has made steps longer.

        Then, and if it has not brought half of its predicted gain, the next one must promise more, and comes
        later: times do not follow from batches as the models say.
        """
        longer = now_s > _LONGER * promise.before_s
        gained_s = promise.before_s - promise.after_s
        if gained_s > MIN_GAIN * promise.before_s and now_s > promise.before_s - gained_s / 2:
            self._caution = min(_MAX_CAUTION, 2 * self._caution)
        return longer

    def _take_back(
        self, step: int, promise: Promise, now_s: float, reports: Sequence[RankTimes]
    ) -> NewShares:
        before, after = ("/".join(map(str, item)) for item in (self.shares, promise.shares))
        text = (
            f"steps became longer at step {step}, {promise.before_s:.3g} -> {now_s:.3g} s: "
            f"batches {before} -> {after} again"
        )
        self._refinements = []
        return self._change(step, reports, promise.shares, text)

    def _change(self, step: int, reports: Sequence[RankTimes], shares: Shares, text: str) -> NewShares:
        self.shares, self._changed_at = shares, step
        self._slower = [1.0 for _ in shares]
        self.changes += 1
        return NewShares(max(report.ahead for report in reports) + _MARGIN, shares, text)

    def _learn_limits(self, reports: Sequence[RankTimes]) -> bool:
        """Record the ranks' memory limits; return whether the shares exceed them."""
        most = list(self._limits.max_batch or [None] * len(reports))
        exceeded = False
        for rank, report in enumerate(reports):
            limit = most[rank]
            if report.most and (limit is None or report.most < limit):
                most[rank] = report.most
                exceeded = exceeded or self.shares[rank] > report.most
        self._limits = self._limits._replace(max_batch=tuple(most))
        return exceeded

    def _learn(self, rank: int, report: RankTimes, steps: int) -> float:
        """Update the model; return the factor by which the rank has become slower (1.0: as before)."""
        if report.compute_s <= 0.0 or report.samples <= 0:
            return 1.0
        observed, factor = self._observed[rank], 1.0
        alike = [samples for samples in observed if abs(samples - report.samples) <= _CHANGED * samples]
        if len(observed) > 1 or alike:
            ratio = report.compute_s / _fitted(observed).compute_s(report.samples)
            if abs(ratio - 1.0) > _CHANGED:
                factor = ratio
                for samples, item in observed.items():
                    observed[samples] = item._replace(compute_s=item.compute_s * factor)
        found = TimedShare(report.samples, report.compute_s, steps)
        before = observed.pop(report.samples, None)
        if before is not None and factor == 1.0:
            together = before.steps + steps
            mean_s = (before.compute_s * before.steps + found.compute_s * steps) / together
            found = TimedShare(report.samples, mean_s, min(_STEPS_KEPT, together))
        observed[report.samples] = found
        while len(observed) > _SIZES_KEPT:
            del observed[next(iter(observed))]
        return factor

    def _text(
        self, step: int, reports: Sequence[RankTimes], shares: Shares, now_s: float, then_s: float
    ) -> str:
        """Return the description of a change in one line.

        Like ``jetson1 slowed to 0.6x at step 812: batches 54/21/21 -> 62/13/21, step 1.9 -> 1.1 s``.
        """
        factors = self._slower
        rank = max(range(len(factors)), key=lambda rank: abs(factors[rank] - 1.0))
        if abs(factors[rank] - 1.0) <= _CHANGED:
            rank = max(range(len(reports)), key=lambda rank: reports[rank].compute_s)
            why = f"{self._hosts[rank]} is the slowest at step {step}"
        else:
            verb = "slowed" if factors[rank] > 1.0 else "sped up"
            why = f"{self._hosts[rank]} {verb} to {1.0 / factors[rank]:.2g}x at step {step}"
        before, after = ("/".join(map(str, item)) for item in (self.shares, shares))
        return f"{why}: batches {before} -> {after}, step {now_s:.3g} -> {then_s:.3g} s predicted"


def _fitted(observed: Dict[int, TimedShare]) -> ComputeTime:
    return fit(list(observed.values()), _PROPORTIONAL)
