"""``rc.predict``: how long a training step takes on more machines, and what limits it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..collective.codec_rates import CODECS, CODING_BYTE_S
from ..configuration.parsing import MAX_RANKS
from ..errors import ConfigError
from ..ops import finite_numbers, is_whole
from ..schedule.closed_form import Cost, best_method, reduce_cost
from ..schedule.machine import Machine, Method, grid, link_byte_s
from .figure import Line, line_chart
from .step import Workload, time_step, workload

Number = Union[int, float]

_HIDDEN = 0.05
"""Below this part of a step, what communication adds is not what bounds it."""
_SLOW = 1.1
"""From here on the slowest rank's computation is what bounds a step."""


class PredictedRow(NamedTuple):
    """One number of ranks, and one way to reduce their gradients.

    Attributes:
        ranks: that train.
        machines: hosts, those of extra servers included.
        method: how gradients are reduced, as text.
        step_s: predicted seconds per step.
        exposed_s: of them, communication that no computation hides.
        samples_per_s: of all ranks together; steps of single ranks per second if no batch was given.
        efficiency: that, divided by so many times one rank alone.
        bound: what limits the step: ``compute``, ``slow rank``, ``wire``, ``interface of a host``,
            ``local links``, ``processor`` or ``latency``.
        wire_bytes: what the busiest interface sends per step.
        cost: of a million samples, in the unit of the price; None without a price.
        line: the name of this way for all numbers of ranks, in a figure.
    """

    ranks: int
    machines: int
    method: str
    step_s: float
    exposed_s: float
    samples_per_s: float
    efficiency: float
    bound: str
    wire_bytes: float
    cost: Optional[float]
    line: str


class Prediction(NamedTuple):
    """What :func:`predict` returns.

    Attributes:
        rows: for each number of ranks all ways to reduce, that which ringcomm would choose first.
        batch: samples of a rank per step; 0: not given.
        bound: ``at most`` or ``at least``, if steps only are known to take no longer, or no shorter; else "".
    """

    rows: Tuple[PredictedRow, ...]
    batch: int = 0
    bound: str = ""

    def table(self) -> str:
        """All rows as lines of text of up to 80 columns; with a price the cost is in place of the rate."""
        priced = any(row.cost is not None for row in self.rows)
        step_mark, rate_mark = {"at most": ("≤ ", "≥ "), "at least": ("≥ ", "≤ ")}.get(self.bound, ("", ""))
        rate = "cost/1M" if priced else "samples/s" if self.batch else "steps/s"
        cells = [["ranks", "hosts", "gradients by", "step", rate, "eff.", "bound by"]]
        last = 0
        for row in self.rows:
            cells.append([
                str(row.ranks) if row.ranks != last else "", str(row.machines),
                row.method.replace(" steps", ""), f"{step_mark}{row.step_s:.4f}s",
                f"{rate_mark}{row.samples_per_s:.1f}"
                if row.cost is None else f"{step_mark}{_amount(row.cost)}",
                f"{rate_mark}{100 * row.efficiency:.0f} %", row.bound,
            ])  # fmt: skip
            last = row.ranks
        widths = [max(map(len, column)) for column in zip(*cells)]
        left = (2, len(widths) - 1)
        return "\n".join(
            " ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in cells
        )

    def svg(self) -> str:
        """Efficiency against the number of ranks, one line for each way to reduce, as a picture in SVG."""
        lines: Dict[str, List[Tuple[float, float]]] = {}
        for row in self.rows:
            lines.setdefault(row.line, []).append((row.ranks, 100 * row.efficiency))
        drawn = [Line(name, tuple(points)) for name, points in lines.items()]
        return line_chart(
            "Predicted scaling efficiency" + (f": steps take {self.bound} as long" if self.bound else ""),
            "ranks", "% of ranks times one rank alone (all points simulated)",
            drawn, y_from_zero=True,
        )  # fmt: skip


def _amount(cost: float) -> str:
    return f"{cost:.2f}" if cost < 1000 else f"{cost:.0f}"


def predict(
    compute_s: Number,
    gradients: Union[int, Sequence[int]],
    ranks: Sequence[int] = (2, 4, 8, 16),
    link: str = "1gbit",
    slots: int = 1,
    batch: int = 0,
    price: Optional[Number] = None,
    overlap: bool = True,
    ready_s: Optional[Sequence[Number]] = None,
    latency_s: Optional[Number] = None,
    local_steps: int = 8,
) -> Prediction:
    """Predict how a training step scales to more ranks, from numbers alone.

    Example: ``print(rc.predict(0.36, 4 * 25_557_032, ranks=[2, 8, 32], link="1gbit", batch=32).table())``.

    Args:
        compute_s: seconds of computation of one step on one rank.
        gradients: bytes of all gradients in float32, or of each in the order in which they become ready.
        ranks: numbers of ranks to predict, from 1 to :data:`MAX_RANKS`.
        link: line rate of the hosts' interfaces, like ``1gbit`` or ``100mbit``.
        slots: ranks per host.
        batch: samples of one rank per step; 0: rates are in steps per second, of all ranks together.
        price: of one machine per hour, in any currency; it needs a batch.
        overlap: whether gradients are reduced while others are computed.
        ready_s: when each gradient is ready, in seconds since the beginning of the step; by default they
            become ready in proportion to their bytes, in the last two thirds of the computation.
        latency_s: of a message between two hosts, in seconds; by default 50 microseconds.
        local_steps: number of steps between two reductions in the rows for local steps.

    Returns:
        the predictions, with a table and a figure.

    Raises:
        ConfigError: an argument is out of range.
    """
    lengths = _lengths(gradients)
    whole = is_whole(slots, 1) and is_whole(batch, 0) and is_whole(local_steps, 2)
    if not finite_numbers([compute_s], 0.0, above=True) or not whole:
        raise ConfigError(
            "predict: compute_s is a positive number of seconds, slots is at least 1, batch at least 0, "
            "local_steps at least 2."
        )
    counts = finite_numbers(ranks, 1)
    if not counts or not all(is_whole(count, 1) and count <= MAX_RANKS for count in counts):
        raise ConfigError(f"predict: ranks={ranks!r}: a list of numbers of ranks, from 1 to {MAX_RANKS}.")
    if price is not None and not finite_numbers([price], 0.0, above=True):
        raise ConfigError("predict: the price of a machine per hour is positive.")
    if price is not None and not batch:
        raise ConfigError("predict: costs are those of a million samples, so a price needs a batch.")
    if not isinstance(link, str):
        raise ConfigError(f"predict: link={link!r}: a rate like 1gbit, 100mbit or 2.5gbit.")
    times = finite_numbers(ready_s, 0.0)
    if ready_s is not None and (len(times) != len(lengths) or sorted(times) != times):
        raise ConfigError("predict: ready_s has one time for each gradient, in ascending order.")
    if times and (not overlap or times[-1] > compute_s):
        raise ConfigError("predict: ready_s needs overlap, and no gradient is ready after compute_s.")
    if latency_s is not None and not finite_numbers([latency_s], 0.0):
        raise ConfigError(f"predict: latency_s={latency_s!r}: a number of seconds, not negative.")
    machine = Machine((link_byte_s(link),))
    if latency_s is not None:
        machine = machine._replace(wire_latency_s=float(latency_s))
    work = workload(float(compute_s), lengths, overlap)
    if times:
        work = work._replace(ready_s=tuple(map(float, times)))
    return predictions(work, machine, counts, [slots], batch, price, local_steps)


def _lengths(gradients: Union[int, Sequence[int]]) -> List[int]:
    """The bytes of each gradient."""
    lengths = finite_numbers(gradients, 1) or finite_numbers([gradients], 1)
    if not lengths:
        raise ConfigError(
            "predict: gradients are a number of bytes, or one for each gradient, at least 1 each."
        )
    return [int(nbytes) for nbytes in lengths]


def predictions(
    work: Workload,
    machine: Machine,
    ranks: Sequence[int],
    slots: Sequence[int],
    batch: int = 0,
    price: Optional[Number] = None,
    local_steps: int = 8,
    coding_byte_s: Mapping[str, float] = MappingProxyType({}),
) -> Prediction:
    """The predictions behind :func:`predict`, for a step and machines that were measured.

    Args:
        work: the step.
        machine: the model of hosts and links.
        ranks: numbers of ranks.
        slots: ranks of each host; further hosts have as many as the last one.
        batch: samples of one rank per step; 0: unknown.
        price: of one machine per hour.
        local_steps: for the rows of local steps.
        coding_byte_s: by codec, the measured processor time per byte for encoding and decoding.
    """
    rows: List[PredictedRow] = []
    for count in sorted({int(count) for count in ranks}):
        places = grid(count, slots)
        ways = _methods(count, places, sum(work.gradients), machine, local_steps, coding_byte_s)
        rows.extend(_row(line, method, work, machine, places, batch, price) for method, line in ways.items())
    return Prediction(tuple(rows), batch)


def _methods(
    count: int, places: Sequence[int], nbytes: int, machine: Machine, local_steps: int,
    measured_byte_s: Mapping[str, float],
) -> Dict[Method, str]:  # fmt: skip
    """Return what is compared for a number of ranks, and its line; ringcomm's choice comes first."""
    best = best_method(nbytes, machine, places)
    found = {best: "ringcomm"}
    if count < 2:
        return found
    for name in CODECS:
        coding_byte_s = measured_byte_s.get(name, CODING_BYTE_S[name])
        method = best_method(nbytes, machine, places, name)._replace(coding_byte_s=coding_byte_s)
        found[method] = f"ringcomm, {name}"
    found[best._replace(local_steps=local_steps)] = f"ringcomm, every {local_steps} steps"
    half = count // 2
    servers = {half: "servers on half of the ranks", 1: "1 server"}  # of 2 or 3 ranks, half are 1
    extra = {half: "half as many extra servers", 1: "1 extra server", count: "as many extra servers"}
    found.update((Method("servers", number), servers[number]) for number in sorted(servers))
    found.update((Method("servers", number, dedicated=True), extra[number]) for number in sorted(extra))
    return found


def _row(
    line: str,
    method: Method,
    work: Workload,
    machine: Machine,
    places: Sequence[int],
    batch: int,
    price: Optional[Number],
) -> PredictedRow:
    count = sum(places)

    def cost(nbytes: int) -> Cost:
        return reduce_cost(method, nbytes, machine, places)

    timing = time_step(work, lambda nbytes: cost(nbytes).seconds, method.local_steps)
    whole = cost(sum(work.gradients))
    usual_s = work.usual_s or work.compute_s
    machines = len(places) + (method.servers if method.dedicated else 0)
    rate = count * (batch or 1) / timing.step_s
    bound = whole.bound
    if timing.exposed_s < _HIDDEN * timing.step_s:
        bound = "slow rank" if work.compute_s > _SLOW * usual_s else "compute"
    per_hour = None if price is None or not batch else machines * float(price)
    return PredictedRow(
        count, machines, method.label, timing.step_s, timing.exposed_s, rate, usual_s / timing.step_s, bound,
        max(whole.wire_bytes) / method.local_steps,
        None if per_hour is None else 1e6 * per_hour / (3600 * rate), line,
    )  # fmt: skip
