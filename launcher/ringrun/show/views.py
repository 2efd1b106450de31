"""The views of counters: a table with a line per rank while a job runs (one line without a terminal), and the
page of ``--report``: one HTML file with figures, without scripts and external resources. Pure.
"""

from __future__ import annotations

import math
import re
import time
from html import escape as escape_html
from textwrap import wrap
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .history import MIN_DELIVERED_BYTES, History, KindNumbers, RankHistory, RankRates, Sample, Slowest
from .visible import columns, visible, visible_line

STALE_S = 5.0  # a rank that has not answered for so long is shown as silent
KEYS = "s: stacks of all ranks, q: leave this view (the job goes on)"
WIDTH = 78
"""Columns at which sentences below the table are wrapped; longer lines are cut."""
_TITLES = ("rank", "host", "step", "steps/s", "sent MB/s", "waits", "in")
_TEXTS = 6
"""The first column of text after the numbers."""
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
    """Return at most `rows` lines (5 or more) of the table; `keys` tells whether keys are read."""
    present = sorted(history.present().items())
    slowest = history.slowest(hosts, now=True)
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
            text = f">{lines[index + 1][1:]}"
            lines[index + 1] = f"{_RED}{text}{_PLAIN}" if coloured else text
    if len(shown) < len(present):
        lines.append(f"  and {len(present) - len(shown)} more ranks")
    lines += below
    return [*lines, KEYS] if keys else lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, (cell, width) in enumerate(zip(cells, widths)):
        spaces = " " * (width - columns(cell))
        padded.append(cell + spaces if column == 1 or column >= _TEXTS else spaces + cell)
    return "  " + "  ".join(padded).rstrip()


def _cells(rank: int, host: str, process: RankHistory, now_s: float) -> Tuple[str, ...]:
    sample, rates = process.latest, process.rates
    numbers = ("-", "-", "-")
    if rates is not None:
        steps = amount(rates.steps) if sample.steps else "-"
        numbers = (steps, amount(rates.sent_bytes / 1e6), f"{100 * rates.waited:.0f} %")
    return (str(rank), host, str(sample.steps) if sample.steps else "-", *numbers, _where(sample, now_s))


def _where(sample: Sample, now_s: float) -> str:
    """Return the collective that a rank is in, and the ranks it waits for."""
    silent_s = now_s - sample.at_s
    if silent_s > STALE_S:
        return f"no answer for {silent_s:.0f} s"
    if not sample.inside:
        return "its own code"
    # A call by name (its collective, its arguments, its tensors' names) with the names first: the line may be
    # cut at the edge.
    doing = visible_line(re.sub(r"(?s)^(\w+)(\(.*\)) ('.*)$", r"\1 \3 \2", sample.doing))
    if not sample.waits_for:
        return doing
    ranks = ", ".join(map(str, sample.waits_for[:4])) + (", ..." if len(sample.waits_for) > 4 else "")
    return f"waits for {ranks} in {doing}"


def slowest_text(slowest: Slowest, history: History, hosts: Mapping[int, str]) -> str:
    """Return a sentence about the slowest rank; `hosts` are by process."""
    host = hosts.get(history.present().get(slowest.rank, -1), "?")
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
    processes = [history.processes[number] for number in history.present().values()]
    known = [rates for process in processes if (rates := process.rates) is not None]
    if not known:
        return ""
    steps = max(process.latest.steps for process in processes)
    parts = [f"step {steps}, {amount(max(item.steps for item in known))} steps/s"] if steps else []
    parts.append(f"{amount(sum(item.sent_bytes for item in known) / 1e6)} MB/s sent by all ranks")
    waited = [item.waited for item in known]
    parts.append(f"waiting {100 * min(waited):.0f} to {100 * max(waited):.0f} % of the time")
    slowest = history.slowest(hosts, now=True)
    text = ", ".join(parts)
    return text if slowest is None else f"{text}; {slowest_text(slowest, history, hosts)}"


def duration(seconds: float) -> str:
    """Return a time in words, like ``3.2 s``, ``5 min 7 s`` or ``2 h 30 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


# -- the page of --report -------------------------------------------------------------------------

_MB = 1e6
_RANKS_SHOWN, _LINKS_SHOWN, _OPERATIONS_SHOWN = 32, 200, 12
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fff}
body{max-width:900px;margin:24px auto;padding:0 16px}
h1{font-size:22px;margin-bottom:4px}h2{font-size:17px;margin:28px 0 6px}p{margin:6px 0}
table{border-collapse:collapse;font-size:14px}
th,td{padding:3px 8px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th{font-weight:600}td.t,th.t{text-align:left;overflow-wrap:anywhere;white-space:normal}td.t{min-width:8em}th.t{overflow-wrap:normal}
.names td.t{min-width:22em}.names th{white-space:normal}
tr.slow td{background:#fde8e6;font-weight:600}
pre{background:#f5f5f5;padding:10px;white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
.note{color:#555;font-size:13px}.slowest{background:#fde8e6;padding:8px 12px;border-left:4px solid #c0392b}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}.lines{width:100%;min-width:600px}
.grid{stroke:#e3e3e3}.curve{fill:none;stroke-linejoin:round}
.end{text-anchor:end}.middle{text-anchor:middle}
.legend{font-size:13px}.key{margin-right:12px;white-space:nowrap}
.key i{display:inline-block;width:12px;height:4px;margin-right:5px;vertical-align:middle}
.wide{overflow-x:auto}
"""
_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 34


class ReportFacts(NamedTuple):
    """The content of the report besides counters; `reason` says how the job ended."""

    program: str
    version: str  # of ringcomm
    began_at: float  # in seconds of the wall clock
    took_s: float
    reason: str
    failure: str = ""  # the report of the failure
    changes: Tuple[Tuple[float, str], ...] = ()  # of membership: seconds since the start, text
    settings: Tuple[Tuple[str, str, str], ...] = ()  # name, value, source


def html_report(facts: ReportFacts, history: History, hosts: Mapping[int, str]) -> str:
    """Return the file's text; `hosts` has the host name of each process."""
    samples = history.samples()
    title = facts.program
    count = len(history.present())
    if count:
        title += f" on {count} rank{'' if count == 1 else 's'}"
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.began_at))
    slowest = history.slowest(hosts)
    parts = [
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
        "<meta http-equiv=\"Content-Security-Policy\" "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>Started {began}, took {duration(facts.took_s)}: {escape(facts.reason)}. "
        f"ringcomm {escape(facts.version)}.</p>"
    ]
    if slowest is not None:
        text = slowest_text(slowest, history, hosts)
        parts.append(f'<p class="slowest">{escape(text[0].upper() + text[1:])}.</p>')
    if facts.failure:
        parts.append(f"<h2>Failure</h2><pre>{escape(facts.failure)}</pre>")
    if samples:
        parts += [_ranks(history, hosts, slowest, bool(facts.changes)), _curves(history, hosts, slowest)]
        parts += [_waiting(history), _kinds(samples), _links(history, hosts), _operations(samples)]
    else:
        parts.append(
            "<p>No rank has reported numbers: none has called <code>ringcomm.init()</code>, or the job ended "
            "before the first numbers came.</p>"
        )
    if facts.changes:
        rows = [(f"{at_s:.0f} s", text) for at_s, text in facts.changes]
        parts.append("<h2>Changes of membership</h2>" + _html_table(("after", "change"), rows, (0, 1)))
    if facts.settings:
        parts.append("<h2>Settings</h2>" + _settings(facts.settings))
    return "".join(parts) + "</body></html>\n"


def _html_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (), slow: int = -1
) -> str:
    """Return a table; `left` are the columns of text, `slow` is the highlighted row."""
    marks = [' class="t"' if column in left else "" for column in range(len(titles))]
    head = "".join(f"<th{mark}>{escape(title)}</th>" for mark, title in zip(marks, titles))
    body = [
        f"<tr{' class=slow' if index == slow else ''}>"
        + "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row))
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    return _wide(f"<table><tr>{head}</tr>{''.join(body)}</table>")


def _wide(part: str, more: str = "") -> str:
    """Return a part that is scrolled sideways if the window is narrower."""
    return f'<div class="wide{more}">{part}</div>'


def _ranks(history: History, hosts: Mapping[int, str], slowest: Optional[Slowest], has_changed: bool) -> str:
    rows = []
    present = history.present()
    for rank, number in present.items():
        sample = history.processes[number].latest
        elapsed_s = max(sample.elapsed_s, 1e-9)
        rows.append((
            str(rank), hosts.get(number, "?"), str(sample.steps) if sample.steps else "-",
            shown(sample.steps / elapsed_s) if sample.steps else "-", str(sample.calls),
            f"{100 * min(1.0, sample.waited_s / elapsed_s):.0f} %",
            shown(sample.sent_bytes / _MB), shown(sample.received_bytes / _MB),
            duration(sample.elapsed_s),
        ))  # fmt: skip
    titles = "rank", "host", "steps", "steps/s", "collectives", "waited", "sent MB", "received MB", "time"
    slow = -1 if slowest is None else list(present).index(slowest.rank)
    note = (
        '<p class="note">"waited" is the part of the time in collectives: moving data, or waiting for other '
        "ranks. The slowest rank waits least.</p>"
    )
    if has_changed:
        note += '<p class="note">All numbers of this table are since the last change of the ranks.</p>'
    return "<h2>Ranks</h2>" + _html_table(titles, rows, (1, 9), slow) + note


def _curves(history: History, hosts: Mapping[int, str], slowest: Optional[Slowest]) -> str:
    ranks = {number: rank for rank, number in history.present().items()}
    has_steps = any(sample.steps for _, sample in history.samples())
    first: Tuple[str, str, Callable[[RankRates], float]] = (
        ("Steps per second", "steps/s", lambda rates: rates.steps) if has_steps
        else ("Collectives per second", "collectives/s", lambda rates: rates.calls)
    )  # fmt: skip
    found = ""
    for title, unit, value in (
        first, ("Part of the time in collectives", "%", lambda rates: 100 * rates.waited),
        ("Sent", "MB/s", lambda rates: rates.sent_bytes / _MB),
    ):  # fmt: skip
        curves = [
            Curve(
                f"rank {ranks.get(number, number)} ({hosts.get(number, '?')})",
                [(at_s, value(rates)) for at_s, rates in process.points],
                f"hsl({(number * 137) % 360},60%,{40 + 12 * (number % 2)}%)",  # neighbours differ clearly
                slowest is not None and ranks.get(number) == slowest.rank,
            )
            for number, process in sorted(history.processes.items())
        ]
        found += f"<h2>{title}</h2>{_wide(diagram(curves, 'seconds', unit))}"
    return found


def _waiting(history: History) -> str:
    """Return the seconds that each rank has waited for each other one; larger ones are darker."""
    matrix, ranks = history.matrix(), sorted(history.present())[:_RANKS_SHOWN]
    if len(ranks) < 2:
        return ""
    most = max(matrix.values(), default=0.0) or 1.0
    rows = []
    for rank in ranks:
        cells = [f"<th>{rank}</th>"]
        for other in ranks:
            seconds = matrix.get((rank, other), 0.0)
            shade = f"rgba(192,57,43,{0.8 * seconds / most:.2f})"
            cell = f'<td style="background:{shade}">{seconds:.3g}</td>'
            cells.append("<td></td>" if rank == other else cell)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{rank}</th>" for rank in ranks)
    note = (
        '<p class="note">Seconds that the rank of the row has waited for data of the rank of the column, '
        "which may have waited itself meanwhile.</p>"
    )
    table = _wide(f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>")
    return f"<h2>Waiting between ranks</h2>{table}{note}"


def _sum(tables: Sequence[Mapping[str, KindNumbers]]) -> Dict[str, KindNumbers]:
    found: Dict[str, KindNumbers] = {}
    for name, item in (row for table in tables for row in table.items()):
        runs, took_s, moved_bytes = found.get(name, KindNumbers())
        found[name] = KindNumbers(runs + item.runs, took_s + item.took_s, moved_bytes + item.moved_bytes)
    return found


def _kinds(samples: Sequence[Tuple[int, Sample]]) -> str:
    kinds = sorted(_sum([sample.kinds for _, sample in samples]).items(), key=lambda it: -it[1].moved_bytes)
    # Each byte is sent by one rank and received by another one.
    rows = [(kind, str(item.runs), shown(item.moved_bytes / 2 / _MB)) for kind, item in kinds]
    titles = ("collective", "runs of all ranks", "MB")
    return "<h2>Bytes by kind of collective</h2>" + _html_table(titles, rows, (0,)) if rows else ""


def _links(history: History, hosts: Mapping[int, str]) -> str:
    rows = []
    present = history.present()
    for rank, number in present.items():
        sample = history.processes[number].latest
        elapsed_s = max(sample.elapsed_s, 1e-9)
        for other, peer in sorted(sample.peers.items()):
            enough = peer.busy_s and peer.delivered_bytes >= MIN_DELIVERED_BYTES
            speed = peer.delivered_bytes / peer.busy_s / _MB if enough else 0.0
            rows.append((
                f"{rank} ({hosts.get(number, '?')})", f"{other} ({hosts.get(present.get(other, -1), '?')})",
                _interfaces(history, rank, other),
                shown(peer.sent_bytes / _MB), shown(peer.sent_bytes / _MB / elapsed_s),
                f"{speed:.3g}" if speed else "-",
                f"{100 * min(1.0, peer.busy_s / elapsed_s):.0f} %" if speed else "-",
            ))  # fmt: skip
    if not rows:
        return ""
    more = f"<p>and {len(rows) - _LINKS_SHOWN} more</p>" if len(rows) > _LINKS_SHOWN else ""
    titles = "from rank", "to rank", "interfaces", "MB", "MB/s on average", "MB/s while busy", "busy"
    note = (
        '<p class="note">"busy": while the TCP connection had something to send, as the system counts it; '
        "inside a host nothing is counted.</p>"
    )
    return f"<h2>Links</h2>{_html_table(titles, rows[:_LINKS_SHOWN], (0, 1, 2))}{more}{note}"


def _interfaces(history: History, rank: int, other: int) -> str:
    """Return the interfaces at both ends of a link, as text."""
    ends = [history.interfaces.get(pair) for pair in ((rank, other), (other, rank))]
    if ends == ["unix", "unix"]:
        return "inside the host"
    return " to ".join(text or "?" for text in ends) if any(ends) else "-"


def _operations(samples: Sequence[Tuple[int, Sample]]) -> str:
    found = _sum([sample.operations for _, sample in samples])
    names = sorted(found, key=lambda name: -found[name].took_s)[:_OPERATIONS_SHOWN]
    if not names:
        return ""
    rows = []
    for name in names:
        runs, took_s, moved_bytes = found[name]
        each_ms = f"{1e3 * took_s / max(1, runs):.3g}"
        rows.append((name, str(runs), f"{took_s:.2f}", each_ms, shown(moved_bytes / 2 / _MB)))
    titles = ("operation", "runs of all ranks", "seconds", "ms each", "MB")
    return "<h2>Operations that took longest</h2>" + _wide(_html_table(titles, rows, (0,)), " names")


def _settings(settings: Sequence[Tuple[str, str, str]]) -> str:
    chosen = [row for row in settings if row[2] != "default"]
    rest = [row for row in settings if row[2] == "default"]
    titles = ("setting", "value", "set by")
    own = _html_table(titles, chosen, (0, 1, 2)) if chosen else "<p>All have their defaults.</p>"
    others = _html_table(titles[:2], [row[:2] for row in rest], (0, 1))
    return f"{own}<details><summary>{len(rest)} settings with their defaults</summary>{others}</details>"


# -- figures ----------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Return text for HTML or SVG. Control characters, which neither may contain, become visible."""
    return escape_html(visible(text))


class Curve(NamedTuple):
    """A line of a diagram: (x, y) points with ascending x, and a colour of CSS."""

    label: str
    points: Sequence[Tuple[float, float]]
    colour: str
    bold: bool = False


def ticks(most: float, count: int = 4) -> List[float]:
    """Return about `count` round numbers from 0 to at least `most`.

    >>> ticks(7.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if most <= 0.0:
        return [0.0, 1.0]
    rough = most / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * unit >= rough * 0.999)
    return [index * step for index in range(math.ceil(most / step - 1e-9) + 1)]


def shown(value: float) -> str:
    """Return a number at an axis or in a cell; below a thousandth it is 0.

    >>> shown(0.25), shown(12.0), shown(2500.0), shown(0.01234), shown(0.0001)
    ('0.25', '12', '2500', '0.012', '0')
    """
    if abs(value) < 0.1:
        return f"{round(value, 3):g}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def diagram(curves: Sequence[Curve], x_title: str, y_title: str) -> str:
    """Return a diagram of curves with points over time, with titles of both axes and a legend below it."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return "<p>Too few numbers for a curve.</p>"
    x_ticks, y_ticks = ticks(max(x for x, _ in points), 6), ticks(max(y for _, y in points))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + width * x / x_ticks[-1]

    def y_of(y: float) -> float:
        return _TOP + height * (1.0 - y / y_ticks[-1])

    parts = [
        f'<svg class="lines" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_title)}">'
    ]
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y_of(y):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y_of(y) + 4:.1f}" class="end">{shown(y)}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{x_of(x):.1f}" y="{_HEIGHT - 18}" class="middle">{shown(x)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" class="end">{escape(x_title)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 3}">{escape(y_title)}</text>')
    for curve in curves:
        if curve.points:
            path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in curve.points)
            style = f'stroke="{curve.colour}" stroke-width="{3 if curve.bold else 1.3}"'
            title = f"<title>{escape(curve.label)}</title>"
            parts.append(f'<path class="curve" d="M{path}" {style}>{title}</path>')
    return "".join(parts) + "</svg>" + _legend(curves)


def _legend(curves: Sequence[Curve]) -> str:
    items = [
        f'<span class="key"><i style="background:{curve.colour}"></i>'
        f"{'<b>' if curve.bold else ''}{escape(curve.label)}{'</b>' if curve.bold else ''}</span>"
        for curve in curves
    ]
    return f'<p class="legend">{" ".join(items)}</p>'
