"""Which machines a job should use: the predicted time of a step for every subset of them.

The time is the compute time of the slowest rank with balanced batches, plus the communication that does not
overlap with it. The cost model predicts communication, scaled to agree with the measurement on all machines.
"""

from __future__ import annotations

from itertools import combinations
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..errors import ConfigError
from ..ops import finite_numbers, is_whole
from ..schedule.calibration import LOCAL_BYTE_S, LOCAL_LATENCY_S, MESSAGE_S, REDUCE_BYTE_S, WIRE_LATENCY_S
from ..schedule.closed_form import best_allreduce, machine_of
from ..schedule.cost import CostModel
from .plan import ComputeTime, ShareLimits, Shares, compute_s, plan_shares

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
        best: the recommended one.
        rows: all of them, the fastest first.
        text: the recommendation in one line.
    """

    best: Row
    rows: Tuple[Row, ...]
    text: str

    def table(self) -> str:
        """The fastest possible jobs, and that with all machines, as lines of text."""
        everything = max(self.rows, key=lambda row: (len(row.hosts), -row.step_s))
        some = self._different()[:_ROWS]
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

    def _different(self) -> List[Row]:
        """Return all rows, but only the first of each rank alone: it sends nothing, with any codec."""
        found: List[Row] = []
        alone = set()
        for row in self.rows:
            if len(row.shares) > 1 or row.hosts not in alone:
                found.append(row)
            if len(row.shares) == 1:
                alone.add(row.hosts)
        return found


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
    """Predict which machines make the fastest job, from numbers alone.

    Example: ``rc.advise([0, 0], [0.01, 0.03], 4 * 11_000_000, [118, 118]).text``.

    Args:
        fixed_s: seconds of computation per step and rank, whatever the number of samples.
        sample_s: seconds of computation per sample and rank.
        gradient_bytes: size of all gradients in bytes.
        mb_per_s: speed of the network interface of each rank's host in MB/s, each way.
        global_batch: samples of all ranks together per step.
        hosts: name of each rank's host; ranks of one host are used together. By default each has its own.
        codecs: by name, the bytes that are sent for each byte of gradients; by default float32 (1.0).
        overlap: which part of the computation communication can run beside, from 0.0 to 1.0.
        latency_s: of a message between two hosts, in seconds.

    Returns:
        the recommendation, and all possible jobs.

    Raises:
        ConfigError: the arguments have different lengths, or are out of range.
    """
    fixed, sample = _column("fixed_s", fixed_s), _column("sample_s", sample_s, above=True)
    rates = _column("mb_per_s", mb_per_s, above=True)
    named = list(map(str, hosts if isinstance(hosts, Iterable) else ()))
    names = [f"rank {rank}" for rank in range(len(fixed))] if hosts is None else named
    if not len(fixed) == len(sample) == len(rates) == len(names):
        raise ConfigError("advise: fixed_s, sample_s, mb_per_s and hosts have one item for each rank.")
    if not finite_numbers([gradient_bytes], 0):
        raise ConfigError(f"advise: gradient_bytes={gradient_bytes}: a number of bytes, not negative.")
    if not is_whole(global_batch, 1):
        raise ConfigError(f"advise: global_batch={global_batch}: a whole number of samples, at least 1.")
    if len(finite_numbers([overlap, latency_s], 0.0)) != 2 or overlap > 1.0:
        raise ConfigError(
            f"advise: overlap={overlap} is from 0.0 to 1.0, latency_s={latency_s} a time, not negative."
        )
    parts = codecs or {"float32": 1.0}
    if not isinstance(parts, Mapping) or not finite_numbers(parts.values(), 0.0, above=True):
        raise ConfigError(f"advise: codecs={codecs!r}: bytes sent per byte are positive numbers.")
    order = list(dict.fromkeys(names))
    model = CostModel(
        LOCAL_LATENCY_S, LOCAL_BYTE_S, REDUCE_BYTE_S, MESSAGE_S,
        hosts=tuple(order.index(name) for name in names),
        wire_latency_s=float(latency_s),
        wire_byte_s=tuple(1e-6 / rates[names.index(name)] for name in order),
    )  # fmt: skip
    speeds = [ComputeTime(float(fixed), float(sample)) for fixed, sample in zip(fixed, sample)]
    return compare(
        names, speeds, model, gradient_bytes, global_batch, parts, overlap=float(overlap)
    )


def _column(name: str, values: Sequence[Number], above: bool = False) -> List[Number]:
    """Return an argument of :func:`advise` that has one number for each rank."""
    numbers = finite_numbers(values, 0.0, above)
    if not numbers:
        least = "above 0" if above else "at least 0"
        raise ConfigError(f"advise: {name}={values!r}: one number for each rank, {least}.")
    return numbers


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
    """Compare all possible jobs with a measured model; the work of :func:`advise`.

    ``codecs`` gives bytes sent per byte of gradients, and ``coding_s`` the seconds that some ranks need to
    encode and decode. ``measured_s`` is the exposed communication of all ranks together; without it,
    ``overlap`` is the part of the computation that communication can overlap. ``measured`` is the largest
    measured batch of each rank, or empty. ``limits`` per rank are ignored.
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
    best = _best(rows)
    return Advice(best, tuple(rows), _text(best, rows, order))


def reduce_s(model: CostModel, ranks: Sequence[int], nbytes: int) -> float:
    """Predict the seconds of an all-reduce among some of the ranks; 0.0 for a single one."""
    if len(ranks) < 2 or not nbytes:
        return 0.0
    hosts = [model.hosts[rank] for rank in ranks] if model.hosts else [0] * len(ranks)
    used = sorted(set(hosts))
    machine, counts = machine_of(model), [hosts.count(host) for host in used]
    if model.hosts:
        machine = machine._replace(wire_byte_s=tuple(model.wire_byte_s[host] for host in used))
    return best_allreduce(nbytes, machine, counts)[1]


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


def _best(rows: Sequence[Row]) -> Row:
    """Return the fewest hosts to which no further one brings a noticeable gain; then the fastest."""
    limit_s = rows[0].step_s / (1.0 - _JOIN_GAIN)
    near = [row for row in rows if row.step_s <= limit_s]
    return min(near, key=lambda row: (len(row.hosts), row.step_s))


def _text(best: Row, rows: Sequence[Row], order: Sequence[str]) -> str:
    """Return the recommendation in one line.

    Like ``use localhost and jetson1; jetson2 would make it slower: 0.92 s with, 0.84 s without``.
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
