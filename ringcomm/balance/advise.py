"""Recommend machines: the predicted time of a step for every subset of them, and ``ringrun --advise``.

The time is the compute time of the slowest rank with balanced batches, plus the communication that does not
overlap with it. The cost model predicts communication, scaled to agree with the measurement on all machines.

``--advise`` measures ranks with two shares, then with balanced ones. Communication is measured with balanced
shares only: with others, early ranks have sent most of their data before the last one arrives, so it would
look cheaper than it is when all arrive at once.
"""

from __future__ import annotations

from itertools import combinations
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..collective.measure import Rates, code_s
from ..errors import ConfigError
from ..ops import finite_numbers, is_whole
from ..schedule.cost import (
    CODEC_SHARE,
    LOCAL_BYTE_S,
    LOCAL_LATENCY_S,
    MESSAGE_S,
    REDUCE_BYTE_S,
    WIRE_LATENCY_S,
    CostModel,
    best_allreduce,
)
from .plan import (
    AHEAD,
    ComputeTime,
    NewShares,
    RankTimes,
    ShareLimits,
    Shares,
    TimedShare,
    compute_s,
    fit,
    plan_shares,
    proportional_shares,
)

Number = Union[int, float]

_MAX_HOSTS = 8  # of more hosts only subsets of the fastest ones are compared
_JOIN_GAIN = 0.05  # a further host must shorten the step by this part
_ROWS = 32
_FAR = 1.5  # relative to measured batches; predictions for larger ones were wrong by 24 to 33 %


class Row(NamedTuple):
    """A possible job: hosts in the given order, codec, predicted seconds per step, and samples per rank."""

    hosts: Tuple[str, ...]
    codec: str
    step_s: float
    samples_per_s: float
    shares: Shares
    beyond: float = 1.0  # largest share of a rank relative to the largest batch measured on it

    @property
    def is_bound(self) -> bool:
        """Return whether its batches are so far from measured ones that its time is a rough bound."""
        return self.beyond > _FAR


class Advice(NamedTuple):
    """The comparison of all possible jobs.

    Attributes:
        best: the recommended job.
        rows: all possible jobs, the fastest first.
        text: the recommendation in one line.
    """

    best: Row
    rows: Tuple[Row, ...]
    text: str

    def table(self) -> str:
        """Return the fastest possible jobs, and the job with all machines, as lines of text."""
        everything = max(self.rows, key=lambda row: (len(row.hosts), -row.step_s))
        # A rank alone sends nothing, with any codec: only its first row is shown.
        alone = {row.hosts: row for row in reversed(self.rows) if len(row.shares) == 1}
        some = [row for row in self.rows if alone.get(row.hosts, row) is row][:_ROWS]
        shown = [*some, *([everything] if len(everything.shares) > 1 and everything not in some else [])]
        lines = ["  step     samples/s  codec     batches         machines"]
        for row in shown:
            batches, machines = "/".join(map(str, row.shares)), ", ".join(row.hosts)
            times = f"{'~' if row.is_bound else ' '}{row.step_s:7.4f} s {row.samples_per_s:9.1f}"
            codec = row.codec if len(row.shares) > 1 else "any"
            lines.append(f"{times}  {codec:<9} {batches:<15} {machines}")
        far = [row.beyond for row in shown if row.is_bound]
        if far:
            lines.append(
                f"~ rough: a batch is up to {max(far):.1f} times as large as those that were measured, and a "
                "step may take a third more or less"
            )
        return "\n".join(lines)


def advise(
    fixed_s: Sequence[Number],
    sample_s: Sequence[Number],
    gradient_bytes: int,
    mb_per_s: Sequence[Number],
    global_batch: int = 96,
    hosts: Optional[Sequence[str]] = None,
    codecs: Optional[Mapping[str, Number]] = None,
    overlap: Number = 0.0,
    latency_s: Number = WIRE_LATENCY_S,
) -> Advice:
    """Predict from numbers which machines make the fastest job.

    Example: ``rc.advise([0, 0], [0.01, 0.03], 4 * 11_000_000, [118, 118]).text``.

    Args:
        fixed_s: for each rank, the seconds of computation per step that do not depend on the samples.
        sample_s: for each rank, the seconds of computation per sample.
        gradient_bytes: size of all gradients in bytes.
        mb_per_s: for each rank, the speed of its host's network interface in MB/s, in each direction.
        global_batch: samples of all ranks together per step.
        hosts: for each rank, the name of its host. Ranks of one host are used together. By default each rank
            has its own host.
        codecs: by name of a codec, the bytes that are sent for each byte of gradients; by default float32
            (1.0).
        overlap: the part of the computation, from 0.0 to 1.0, during which communication can run.
        latency_s: latency of a message between two hosts, in seconds.

    Returns:
        the recommendation, and all possible jobs.

    Raises:
        ConfigError: the arguments have different lengths, or are out of range.
    """
    fixed, sample = finite_numbers(fixed_s, 0.0), finite_numbers(sample_s, 0.0, above=True)
    rates, parts = finite_numbers(mb_per_s, 0.0, above=True), codecs or {"float32": 1.0}
    named = list(map(str, hosts if isinstance(hosts, Iterable) else ()))
    names = [f"rank {rank}" for rank in range(len(fixed))] if hosts is None else named
    if not fixed or not len(fixed) == len(sample) == len(rates) == len(names):
        raise ConfigError(
            "advise: fixed_s, sample_s, mb_per_s and hosts must have one item for each rank; seconds per "
            "sample and MB/s are numbers above 0, fixed_s are not negative."
        )
    if not is_whole(global_batch, 1) or not finite_numbers([gradient_bytes, overlap, latency_s], 0.0):
        raise ConfigError(
            f"advise: global_batch={global_batch!r} must be a whole number from 1; gradient_bytes="
            f"{gradient_bytes!r}, overlap={overlap!r} and latency_s={latency_s!r} must be numbers from 0."
        )
    if overlap > 1.0:
        raise ConfigError(f"advise: overlap={overlap!r} must be at most 1.0.")
    if not isinstance(parts, Mapping) or not finite_numbers(parts.values(), 0.0, above=True):
        raise ConfigError(f"advise: codecs={codecs!r}: bytes sent per byte must be positive numbers.")
    order = list(dict.fromkeys(names))
    model = CostModel(
        LOCAL_LATENCY_S, LOCAL_BYTE_S, REDUCE_BYTE_S, MESSAGE_S,
        hosts=tuple(order.index(name) for name in names),
        wire_latency_s=float(latency_s),
        wire_byte_s=tuple(1e-6 / rates[names.index(name)] for name in order),
    )  # fmt: skip
    speeds = [ComputeTime(float(fixed), float(sample)) for fixed, sample in zip(fixed, sample)]
    return compare(names, speeds, model, gradient_bytes, global_batch, parts, overlap=float(overlap))


def compare(
    names: Sequence[str],
    speeds: Sequence[ComputeTime],
    model: CostModel,
    gradient_bytes: int,
    global_batch: int,
    codecs: Mapping[str, Number],
    measured_s: Optional[float] = None,
    limits: ShareLimits = ShareLimits(),  # noqa: B008 - a tuple of constants
    overlap: float = 0.0,
    coding_s: Optional[Callable[[str, Sequence[int]], float]] = None,
    measured: Sequence[int] = (),
) -> Advice:
    """Compare all possible jobs with a measured model. ``measured_s``: exposed communication of all ranks
    together, or ``overlap``: the part of the computation that it can overlap; ``coding_s``: of some ranks;
    ``measured``: the largest measured batch of each rank.
    """
    order = list(dict.fromkeys(names))
    factor = 1.0
    if measured_s is not None:
        predicted_s = reduce_s(model, range(len(names)), gradient_bytes)
        factor = measured_s / predicted_s if predicted_s > 0.0 else 1.0
    rows: List[Row] = []
    for chosen in _subsets(order, names, speeds, global_batch):
        ranks = [rank for rank, name in enumerate(names) if name in chosen]
        own = [speeds[rank] for rank in ranks]
        try:
            shares = plan_shares(own, global_batch, limits._replace(max_batch=None))
        except ConfigError:
            continue  # too many ranks for the least batch of each
        computed_s = compute_s(own, shares)
        most = [measured[rank] for rank in ranks] if measured else shares
        beyond = max(share / max(1, batch) for share, batch in zip(shares, most))
        for codec, part in codecs.items():
            sent_s = factor * reduce_s(model, ranks, int(gradient_bytes * part))
            coded_s = coding_s(codec, ranks) if coding_s is not None else 0.0
            step_s = computed_s + coded_s + max(0.0, sent_s - overlap * computed_s)
            rows.append(Row(chosen, codec, step_s, global_batch / step_s, shares, max(1.0, beyond)))
    if not rows:
        raise ConfigError(f"advise: no machine can compute a global batch of {global_batch} by itself.")
    rows.sort(key=lambda row: (row.step_s, len(row.hosts)))
    # The fewest hosts to which no further one brings a noticeable gain; then the fastest.
    near = [row for row in rows if row.step_s <= rows[0].step_s / (1.0 - _JOIN_GAIN)]
    best = min(near, key=lambda row: (len(row.hosts), row.step_s))
    return Advice(best, tuple(rows), _text(best, rows, order))


def reduce_s(model: CostModel, ranks: Sequence[int], nbytes: int) -> float:
    """Predict the seconds of an all-reduce among some of the ranks; 0.0 for a single one."""
    if len(ranks) < 2 or not nbytes:
        return 0.0
    hosts = [model.hosts[rank] for rank in ranks] if model.hosts else [0] * len(ranks)
    used = sorted(set(hosts))
    if model.hosts:
        model = model._replace(wire_byte_s=tuple(model.wire_byte_s[host] for host in used))
    return best_allreduce(nbytes, model, [hosts.count(host) for host in used])[1]


def _subsets(
    order: Sequence[str], names: Sequence[str], speeds: Sequence[ComputeTime], total: int
) -> List[Tuple[str, ...]]:
    """Return sets of hosts, in the given order."""
    considered = list(order)
    if len(considered) > _MAX_HOSTS:
        fastest: Dict[str, float] = {}
        for name, speed in zip(names, speeds):
            fastest[name] = fastest.get(name, 0.0) + 1.0 / speed.compute_s(total)
        considered = sorted(order, key=lambda name: -fastest[name])[:_MAX_HOSTS]
    found = [
        tuple(name for name in order if name in chosen)
        for count in range(1, len(considered) + 1)
        for chosen in combinations(considered, count)
    ]
    return found if len(considered) == len(order) else [*found, tuple(order)]


def _text(best: Row, rows: Sequence[Row], order: Sequence[str]) -> str:
    """Return a line like ``use localhost and jetson1; jetson2 would make it slower: 0.92 s with, 0.84 s
    without``.
    """
    left_out = [name for name in order if name not in best.hosts]
    how = "" if best.codec == "float32" else f" with {best.codec}"
    if not left_out:
        return f"use {_listed(best.hosts)}{how}: {best.step_s:.3g} s per step"
    larger = [row for row in rows if set(row.hosts) == {*best.hosts, left_out[0]}]
    larger = larger or [row for row in rows if len(row.hosts) > len(best.hosts)]
    if not larger:
        few = "for more of them the global batch is too small"
        return f"use {_listed(best.hosts)}{how}: {best.step_s:.3g} s per step; {few}"
    with_s = min(row.step_s for row in larger)
    effect = "would make it slower" if with_s > best.step_s else "would hardly make it faster"
    numbers = f"{with_s:.3g} s with, {best.step_s:.3g} s without"
    if len(best.hosts) == 1:
        return f"one machine alone is fastest: {best.hosts[0]}; {left_out[0]} {effect}: {numbers}"
    return f"use {_listed(best.hosts)}{how}; {left_out[0]} {effect}: {numbers}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


WARM_UP = 3  # steps that do not count: compilers compile, and caches fill
WINDOW = 20  # steps of one observation
BALANCED_WINDOW = 12  # the same with balanced shares


class Probe:
    """Replace a :class:`~.plan.Replanner`: shares change twice, and then the measurement ends."""

    def __init__(self, shares: Shares, total: int, limits: ShareLimits) -> None:
        self.window = WARM_UP  # steps until the next reports
        self.finished = False
        self._shares = shares
        self._total = total
        self._limits = limits
        self._reports: List[Sequence[RankTimes]] = []
        self._warm = False

    def decide(self, step: int, reports: Sequence[RankTimes]) -> Optional[NewShares]:
        """Take the reports of all ranks; see :meth:`.plan.Replanner.decide`."""
        if not self._warm:
            self._warm, self.window = True, WINDOW
            return None
        self._reports.append(reports)
        if len(self._reports) == 3 or len(reports) == 1:
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
        return NewShares(max(report.ahead for report in reports) + AHEAD, shares, text)

    def _speeds(self, size: int) -> List[ComputeTime]:
        """Return the model of each rank, from all measurements."""
        rows = [[reports[rank] for reports in self._reports] for rank in range(size)]
        return [
            fit([TimedShare(item.samples, item.compute_s) for item in row if item.compute_s and item.samples])
            for row in rows
        ]

    def advice(
        self, hosts: Sequence[str], model: CostModel, gradient_bytes: int,
        rates: Sequence[Mapping[str, Rates]],
    ) -> Advice:  # fmt: skip
        """Return the recommendation; ``gradient_bytes``: per step, ``rates``: of the codecs, by rank."""
        # A rank without samples only waits; it measures no communication.
        exposed_s = min((item.waited_s for item in self._reports[-1] if item.compute_s > 0.0), default=0.0)

        def coding_s(codec: str, ranks: Sequence[int]) -> float:
            if codec not in rates[0]:
                return 0.0
            return max(code_s(gradient_bytes, len(ranks), rates[rank][codec]) for rank in ranks)

        return compare(
            hosts, self._speeds(len(hosts)), model, gradient_bytes, self._total, CODEC_SHARE, exposed_s,
            self._limits, coding_s=coding_s,
            measured=[max(row[rank].samples for row in self._reports) for rank in range(len(hosts))],
        )  # fmt: skip
