"""When the shares of ranks change, and to what: a state machine fed with measurements of all ranks.

All ranks feed it with the same reports at the same step, so all come to the same decisions without a message.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence

from .plan import Limits, Observation, Shares, Speed, compute_s, fit, plan_shares

WINDOW = 20
"""The median of so many steps is one observation."""
FIRST_WINDOW = 5
"""The same for the first two observations, from which the first model is made."""
LEAST_GAIN = 0.10
"""By which part the predicted step must be shorter, or shares stay as they are."""
REFINING_GAIN = 0.03
"""The same while the first change is refined: only after it are there two batch sizes to fit a model to."""
REFINEMENTS = 2
"""So many decisions after the first change may refine it at once."""
PAUSE = 50
"""The fewest steps between two changes, after the first one and its refinements."""
_CHANGED = 0.10
"""How far an observation may be from the model before the rank counts as changed."""
_SIZES_KEPT = 4
_MARGIN = 2
"""Steps by which ranks may differ when they decide."""


class Report(NamedTuple):
    """What one rank has measured since its last report.

    Attributes:
        samples: its share of a full global batch.
        compute_s: median seconds per step, without waiting for other ranks; 0.0 if nothing was measured.
        waited_s: median seconds per step that it waited, in communication or for other ranks.
        ahead: how many steps its loader takes in advance, at most so far.
        most: the most samples that fit into its memory; 0: not known.
    """

    samples: int
    compute_s: float
    waited_s: float
    ahead: int
    most: int = 0


class Change(NamedTuple):
    """New shares.

    Attributes:
        lead: in how many steps they apply, counted from the step of the decision.
        shares: samples per rank.
        text: what has changed, for people.
    """

    lead: int
    shares: Shares
    text: str


def rank_names(hosts: Sequence[str]) -> List[str]:
    """A name for each rank: its host, and its rank where a host has several.

    >>> rank_names(["desk", "jetson1", "desk"])
    ['desk:0', 'jetson1', 'desk:2']
    """
    return [host if hosts.count(host) == 1 else f"{host}:{rank}" for rank, host in enumerate(hosts)]


class Replanner:
    """Models the speed of every rank, and decides about shares.

    Args:
        shares: those that apply at first.
        total: samples of a global batch.
        limits: what shares must respect.
        hosts: name of each rank, for texts.
    """

    def __init__(self, shares: Shares, total: int, limits: Limits, hosts: Sequence[str]) -> None:
        self.shares = shares
        self.window = FIRST_WINDOW
        self.changes = 0
        self._total = total
        self._limits = limits
        self._hosts = list(hosts)
        self._observed: List[Dict[int, float]] = [{} for _ in shares]
        self._decisions = self._refined_until = 0
        self._changed_at = -PAUSE
        self._slower = [1.0 for _ in shares]

    @property
    def speeds(self) -> List[Optional[Speed]]:
        """The model of each rank; None: nothing was measured yet."""
        return [
            fit([Observation(*item) for item in observed.items()]) if observed else None
            for observed in self._observed
        ]

    def decide(self, step: int, reports: Sequence[Report]) -> Optional[Change]:
        """Take the reports of all ranks, in rank order.

        Args:
            step: number of steps since the start, the same on all ranks.

        Returns:
            new shares, or None: they stay as they are.
        """
        self._decisions += 1
        if self._decisions >= 2:
            self.window = WINDOW
        bounded = self._learn_limits(reports)
        for rank, report in enumerate(reports):
            self._slower[rank] *= self._learn(rank, report)
        known = [speed for speed in self.speeds if speed is not None]
        if not known:
            return None
        # A rank that has computed nothing yet counts as the fastest: otherwise it would never be measured.
        fastest = min(known, key=lambda speed: speed.compute_s(self._total))
        speeds = [fastest if speed is None else speed for speed in self.speeds]
        shares = plan_shares(speeds, self._total, self._limits)
        exposed_s = max(0.0, min((r.waited_s for r in reports if r.compute_s), default=0.0))
        now_s = max(report.compute_s for report in reports) + exposed_s
        then_s = compute_s(speeds, shares) + exposed_s
        refining = self.changes > 0 and self._decisions <= self._refined_until
        least = REFINING_GAIN if refining else LEAST_GAIN
        if shares == self.shares or not (bounded or then_s < (1.0 - least) * now_s):
            return None
        if not (bounded or refining) and step - self._changed_at < PAUSE:
            return None
        text = self._text(step, reports, shares, now_s, then_s)
        self.shares, self._changed_at = shares, step
        self._slower = [1.0 for _ in shares]
        if not self.changes:
            self._refined_until = self._decisions + REFINEMENTS
        self.changes += 1
        return Change(max(report.ahead for report in reports) + _MARGIN, shares, text)

    def _learn_limits(self, reports: Sequence[Report]) -> bool:
        """Take over what ranks have found out about their memory; whether the shares exceed it."""
        most = list(self._limits.max_batch or [None] * len(reports))
        exceeded = False
        for rank, report in enumerate(reports):
            limit = most[rank]
            if report.most and (limit is None or report.most < limit):
                most[rank] = report.most
                exceeded = exceeded or self.shares[rank] > report.most
        self._limits = self._limits._replace(max_batch=tuple(most))
        return exceeded

    def _learn(self, rank: int, report: Report) -> float:
        """Take an observation into the model; by which factor the rank has become slower (1.0: as before)."""
        if report.compute_s <= 0.0 or report.samples <= 0:
            return 1.0
        observed = self._observed[rank]
        factor = 1.0
        nearest = min(observed, key=lambda samples: abs(samples - report.samples), default=0)
        seen_alike = bool(observed) and abs(nearest - report.samples) <= _CHANGED * report.samples
        if len(observed) > 1 or seen_alike:
            expected_s = fit([Observation(*item) for item in observed.items()]).compute_s(report.samples)
            if abs(report.compute_s / expected_s - 1.0) > _CHANGED:
                factor = report.compute_s / expected_s
                for samples in observed:
                    observed[samples] *= factor
        if seen_alike:
            del observed[nearest]  # sizes so close to each other would say nothing about the fixed part
        observed.pop(report.samples, None)
        observed[report.samples] = report.compute_s
        while len(observed) > _SIZES_KEPT:
            del observed[next(iter(observed))]
        return factor

    def _text(self, step: int, reports: Sequence[Report], shares: Shares, now_s: float, then_s: float) -> str:
        """Like ``jetson1 slowed to 0.6x at step 812: batches 54/21/21 -> 62/13/21, step 1.9 -> 1.1 s``."""
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
