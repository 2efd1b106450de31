"""Autotuning: tries fusion thresholds and cycle times while training runs, and keeps the best.

The fusion threshold is up to how many bytes operations are fused into one bucket; the cycle time is how long
ready operations that no thread waits for are kept for others to be fused with them. Rank 0's engine calls
:meth:`Autotuner.ran` for each response of its coordinator, and the coordinator then uses
:attr:`Autotuner.tuning`. The other ranks execute the buckets that a response lists, so they do not need the
settings. Pure: the caller passes the time.

Hill climbing over a small grid: from the present point every neighbour is tried, the best one becomes
the present point, and so on until none is better. A score is the median of several samples of bytes
reduced per microsecond; the first samples at a point are thrown away. When it has converged it goes on
watching: if the amount of data per sample or the score changes for good (another model, another
network), it starts again from where it is.
"""

from __future__ import annotations

from statistics import median
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from .coordinator import Tuning

FUSIONS_BYTES = tuple(1 << shift for shift in range(20, 28))
"""1 MiB to 128 MiB."""
CYCLES_S = (0.0, 0.0005, 0.001, 0.0025, 0.005, 0.01)

BETTER = 1.03
"""A neighbour must be this much better to be moved to: less is noise."""
CHANGED = 1.5
"""A score or an amount of data that differs this much for good means that something has changed."""

Point = Tuple[int, int]
"""A point of the grid: indices into :data:`FUSIONS_BYTES` and :data:`CYCLES_S`."""


class Sampling(NamedTuple):
    """How long to measure.

    Attributes:
        steps: responses per sample: calls of :meth:`Autotuner.ran`, each with the bytes of all its buckets.
        samples: per point, of which the median counts.
        warmup: samples at the start of every point that do not count.
        patience: samples in a row that must differ before tuning starts again.
    """

    steps: int = 10
    samples: int = 5
    warmup: int = 1
    patience: int = 10


class Autotuner:
    """Fed with what has run, it says what to try next.

    Args:
        start: the settings to begin with; the nearest point of the grid is taken.
        sampling: how long to measure.
        log: called with a line of the log for every point measured.

    Attributes:
        converged: whether no neighbour of the present point is better; then :attr:`tuning` stays, until the
            score or the amount of data changes for good.
    """

    HEADER = "cycle_time_ms,tensor_fusion_threshold,score"

    def __init__(
        self,
        start: Tuning,
        sampling: Optional[Sampling] = None,
        log: Optional[Callable[[str], None]] = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self._log = log or (lambda line: None)
        self._best: Point = (_nearest(FUSIONS_BYTES, start.fusion_bytes), _nearest(CYCLES_S, start.cycle_s))
        self._point = self._best
        self._scores: Dict[Point, float] = {}
        self._earlier: Dict[Point, float] = {}  # scores until tuning began again
        self._samples: List[float] = []
        self._amounts: List[float] = []
        self._usual_bytes = 0.0
        self._steps = 0
        self._bytes = 0
        self._since_s: Optional[float] = None
        self._strange = 0
        self._rounds = 0  # since it began, or began again
        self.converged = False
        self._log(self.HEADER)

    @property
    def tuning(self) -> Tuning:
        """What to use now."""
        return Tuning(FUSIONS_BYTES[self._point[0]], CYCLES_S[self._point[1]])

    def result(self) -> str:
        """Return what has been found so far, and what is missing, as a sentence or two for the user."""
        need = self._sampling.steps * (self._sampling.samples + self._sampling.warmup)
        scores = self._scores or self._earlier
        if not scores:
            return (
                f"Autotuning has found nothing: it needs {need} rounds of collectives for each setting that "
                f"it tries, and there were {self._rounds}."
            )
        best = max(scores, key=lambda point: scores[point])
        fusion, cycle = FUSIONS_BYTES[best[0]], CYCLES_S[best[1]]
        found = f"--fusion-threshold {fusion >> 20}M --cycle-time {cycle * 1e3:g}"
        if self.converged or not self._scores:
            return f"Autotuning has found {found} ({scores[best]:.3g} MB/s)."
        untried = [point for point in self._neighbours(self._best) if point not in self._scores]
        missing = max(1, need * len(untried) - self._rounds % need)
        return (
            f"Autotuning has not finished: it needs at least {missing} more rounds of collectives (there "
            f"were {self._rounds}). The best so far: {found} ({scores[best]:.3g} MB/s)."
        )

    def ran(self, nbytes: int, now_s: float) -> bool:
        """A response has been issued.

        Args:
            nbytes: of all operations in it.
            now_s: the time, in seconds.

        Returns:
            whether :attr:`tuning` is to be read again: it may have changed.
        """
        if self._since_s is None:
            self._since_s = now_s
            return False
        self._rounds += 1
        self._bytes += nbytes
        self._steps += 1
        if self._steps < self._sampling.steps:
            return False
        took_us = max(1.0, (now_s - self._since_s) * 1e6)
        score, amount = self._bytes / took_us, float(self._bytes)
        self._since_s, self._steps, self._bytes = now_s, 0, 0
        return self._watch(score, amount) if self.converged else self._sample(score, amount)

    def _sample(self, score: float, amount: float) -> bool:
        self._samples.append(score)
        self._amounts.append(amount)
        if len(self._samples) < self._sampling.warmup + self._sampling.samples:
            return False
        self._scores[self._point] = median(self._samples[self._sampling.warmup :])
        self._usual_bytes = median(self._amounts)
        self._samples, self._amounts = [], []
        used = self.tuning
        self._log(f"{used.cycle_s * 1e3:g},{used.fusion_bytes},{self._scores[self._point]:.6g}")
        self._move()
        return True

    def _move(self) -> None:
        untried = [point for point in self._neighbours(self._best) if point not in self._scores]
        if untried:
            self._point = untried[0]
            return
        top = max(self._neighbours(self._best), key=lambda point: self._scores[point])
        if self._scores[top] > self._scores[self._best] * BETTER:
            self._best = self._point = top
            self._move()
        else:
            self._point = self._best
            self.converged = True
            used = self.tuning
            self._log(f"# best: {used.cycle_s * 1e3:g} ms, {used.fusion_bytes} bytes")

    def _neighbours(self, point: Point) -> List[Point]:
        fusion, cycle = point
        around = [(fusion + 1, cycle), (fusion - 1, cycle), (fusion, cycle + 1), (fusion, cycle - 1)]
        return [(a, b) for a, b in around if 0 <= a < len(FUSIONS_BYTES) and 0 <= b < len(CYCLES_S)]

    def _watch(self, score: float, amount: float) -> bool:
        usual = self._scores[self._best]
        alike = 1 / CHANGED < score / max(usual, 1e-12) < CHANGED
        alike = alike and 1 / CHANGED < amount / max(self._usual_bytes, 1e-12) < CHANGED
        self._strange = 0 if alike else self._strange + 1
        if self._strange < self._sampling.patience:
            return False
        self._log("# something has changed: tuning again")
        self._strange = 0
        self._scores, self._earlier = {}, self._scores
        self._rounds = 0
        self.converged = False
        return True


def _nearest(grid: Tuple[float, ...], value: float) -> int:
    return min(range(len(grid)), key=lambda index: abs(grid[index] - value))
