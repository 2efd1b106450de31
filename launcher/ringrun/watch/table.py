"""The live view: a table with a line per rank, and one line without a terminal. Pure."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import List, Mapping, Optional, Sequence, Tuple

from ..show.visible import columns, visible_line
from .history import History, RankHistory, RankRates, Sample, Slowest, names_of

STALE_S = 5.0
"""A rank that has not answered for this long is shown as silent."""
KEYS = "s: stacks of all ranks, q: leave this view (the job goes on)"
WIDTH = 78
"""Columns at which sentences below the table are wrapped; longer lines are cut."""
_TITLES = ("rank", "host", "step", "steps/s", "sent MB/s", "waits", "in")
_TEXTS = 6
"""The first column of text after the numbers."""
_NAMED = re.compile(r"^(\w+)(\(.*\)) ('.*)$", re.DOTALL)
"""A call by name: the collective, its arguments, the names of its tensors."""
_RED, _BOLD, _PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[0m"


def amount(value: float) -> str:
    """Return a rate with three digits.

    >>> amount(0.0), amount(0.1234), amount(12.345), amount(1234.5)
    ('0', '0.123', '12.3', '1234')
    """
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value else "0"


def table(
    history: History, hosts: Mapping[int, str], now_s: float, coloured: bool, keys: bool, rows: int
) -> List[str]:
    """Return the lines of the table. `hosts` are by process; `keys` tells whether keys are read; `rows` is
    the maximum number of lines, at least 5: the last ranks are left out.
    """
    present = sorted(history.present().items())
    slowest = history.slowest_now(hosts)
    below = [] if slowest is None else wrap(
        slowest_text(slowest, history, hosts), WIDTH, subsequent_indent="  "
    )  # fmt: skip
    shown = present[: max(1, rows - 4 - len(below) + (slowest is not None))]
    cells: List[Tuple[str, ...]] = [_TITLES]
    cells += [
        _cells(rank, visible_line(hosts.get(number, "?")), history.processes[number], now_s)
        for rank, number in shown
    ]
    widths = [max(columns(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [_line(row, widths) for row in cells]
    if coloured:
        lines[0] = f"{_BOLD}{lines[0]}{_PLAIN}"
    for index, (rank, _) in enumerate(shown):
        if slowest is not None and rank == slowest.rank:
            lines[index + 1] = _marked(lines[index + 1], coloured)
    if len(shown) < len(present):
        lines.append(f"  and {len(present) - len(shown)} more ranks")
    lines += below
    return [*lines, KEYS] if keys else lines


def _marked(line: str, coloured: bool) -> str:
    text = f">{line[1:]}"
    return f"{_RED}{text}{_PLAIN}" if coloured else text


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, (cell, width) in enumerate(zip(cells, widths)):
        spaces = " " * (width - columns(cell))
        padded.append(cell + spaces if column == 1 or column >= _TEXTS else spaces + cell)
    return "  " + "  ".join(padded).rstrip()


def _cells(rank: int, host: str, process: RankHistory, now_s: float) -> Tuple[str, ...]:
    sample, rates = process.latest, process.rates
    assert sample is not None
    step = str(sample.steps) if sample.steps else "-"
    if rates is None:
        return (str(rank), host, step, "-", "-", "-", _where(sample, now_s))
    return (
        str(rank), host, step, amount(rates.steps) if sample.steps else "-",
        amount(rates.sent_bytes / 1e6), f"{100 * rates.waited:.0f} %", _where(sample, now_s),
    )  # fmt: skip


def _where(sample: Sample, now_s: float) -> str:
    """Return the collective that a rank is in, and the ranks it waits for."""
    silent_s = now_s - sample.at_s
    if silent_s > STALE_S:
        return f"no answer for {silent_s:.0f} s"
    if not sample.inside:
        return "its own code"
    doing = visible_line(_NAMED.sub(r"\1 \3 \2", sample.doing))  # the line may be cut at the edge
    if not sample.waits_for:
        return doing
    ranks = ", ".join(map(str, sample.waits_for[:4])) + (", ..." if len(sample.waits_for) > 4 else "")
    return f"waits for {ranks} in {doing}"


def slowest_text(slowest: Slowest, history: History, hosts: Mapping[int, str]) -> str:
    """Return a sentence about the slowest rank; `hosts` are by process."""
    host = names_of(history.present(), hosts).get(slowest.rank, "?")
    name = f"rank {slowest.rank} ({visible_line(host)}) is the slowest"
    if not slowest.link_mb_per_s:
        return f"{name}: the others wait for it {100 * slowest.share:.0f} % of the time"
    names = history.interfaces_of(slowest.rank)
    over = f" over {visible_line(' and '.join(names))}" if names else ""
    return (
        f"{name}: its link{over} carries {amount(slowest.link_mb_per_s)} MB/s and is busy "
        f"{100 * slowest.share:.0f} % of the time; links between other hosts carry "
        f"{amount(slowest.other_mb_per_s)} MB/s"
    )


def line(history: History, hosts: Mapping[int, str]) -> str:
    """Return one line about the whole job; "" before any rank has reported. `hosts` are by process."""
    present = history.present()
    rates = [history.processes[number].rates for number in present.values()]
    known: List[RankRates] = [item for item in rates if item is not None]
    if not known:
        return ""
    steps = max((process.latest.steps for process in _of(history, present) if process.latest), default=0)
    parts = [f"step {steps}, {amount(max(item.steps for item in known))} steps/s"] if steps else []
    parts.append(f"{amount(sum(item.sent_bytes for item in known) / 1e6)} MB/s sent by all ranks")
    waited = [item.waited for item in known]
    parts.append(f"waiting {100 * min(waited):.0f} to {100 * max(waited):.0f} % of the time")
    slowest: Optional[Slowest] = history.slowest_now(hosts)
    text = ", ".join(parts)
    return text if slowest is None else f"{text}; {slowest_text(slowest, history, hosts)}"


def _of(history: History, present: Mapping[int, int]) -> List[RankHistory]:
    return [history.processes[number] for number in present.values()]


def duration(seconds: float) -> str:
    """Return a time in words, like ``3.2 s``, ``5 min 7 s`` or ``2 h 30 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
