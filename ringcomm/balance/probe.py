"""``ringrun --advise``: measure ranks with two shares, then balanced ones, and recommend machines.

Communication is measured with balanced shares only. With others, early ranks have sent most of their data
before the last one arrives, so it would look cheaper than it is when all arrive at once.
"""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence

from ..collective.measure import Rates, code_s
from ..schedule.closed_form import CODEC_SHARE
from ..schedule.cost import CostModel
from .advise import Advice, compare
from .plan import ComputeTime, ShareLimits, Shares, TimedShare, fit, plan_shares, proportional_shares
from .replan import NewShares, RankTimes

WARM_UP = 3  # steps that do not count: compilers compile, and caches fill
WINDOW = 20  # steps of one observation
BALANCED_WINDOW = 12  # the same with balanced shares
_MARGIN = 2
_LAST = 3  # the measurement with balanced shares


class Probe:
    """Replace a :class:`~.replan.Replanner`: shares change twice, and then the measurement ends."""

    def __init__(self, shares: Shares, total: int, limits: ShareLimits) -> None:
        self.window = WARM_UP  # steps until the next reports
        self.finished = False
        self._shares = shares
        self._total = total
        self._limits = limits
        self._reports: List[Sequence[RankTimes]] = []
        self._warm = False

    def decide(self, step: int, reports: Sequence[RankTimes]) -> Optional[NewShares]:
        """Take the reports of all ranks; see :meth:`.replan.Replanner.decide`."""
        if not self._warm:
            self._warm, self.window = True, WINDOW
            return None
        self._reports.append(reports)
        if len(self._reports) == _LAST or len(reports) == 1:
            self.finished = True
            return None
        limits = self._limits._replace(max_batch=None)
        if len(self._reports) == 1:
            ratios = [1.0 if rank % 2 == 0 else 2.0 for rank in range(len(reports))]
            shares = proportional_shares(ratios, self._total, limits)
        else:
            self.window = BALANCED_WINDOW
            shares = plan_shares(self._speeds(len(reports)), self._total, limits)
        text = "measured " + "/".join(map(str, self._shares)) + ", now " + "/".join(map(str, shares))
        self._shares = shares
        return NewShares(max(report.ahead for report in reports) + _MARGIN, shares, text)

    def _speeds(self, size: int) -> List[ComputeTime]:
        """Return the model of each rank, from all measurements."""
        return [
            fit([
                TimedShare(reports[rank].samples, reports[rank].compute_s)
                for reports in self._reports
                if reports[rank].compute_s > 0.0 and reports[rank].samples
            ])
            for rank in range(size)
        ]  # fmt: skip

    def advice(
        self,
        hosts: Sequence[str],
        model: CostModel,
        gradient_bytes: int,
        rates: Sequence[Mapping[str, Rates]],
    ) -> Advice:
        """Return the recommendation; ConfigError if no machine can compute the global batch.

        ``gradient_bytes`` are reduced per step; ``rates`` are those of the codecs, by rank.
        """
        speeds = self._speeds(len(hosts))
        # A rank without samples only waits; it measures no communication.
        exposed_s = min((item.waited_s for item in self._reports[-1] if item.compute_s > 0.0), default=0.0)

        def coding_s(codec: str, ranks: Sequence[int]) -> float:
            if codec not in rates[0]:
                return 0.0
            return max(code_s(gradient_bytes, len(ranks), rates[rank][codec]) for rank in ranks)

        return compare(
            hosts,
            speeds,
            model,
            gradient_bytes,
            self._total,
            CODEC_SHARE,
            exposed_s,
            self._limits,
            coding_s=coding_s,
            measured=[max(row[rank].samples for row in self._reports) for rank in range(len(hosts))],
        )
