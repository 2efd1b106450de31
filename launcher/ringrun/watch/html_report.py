"""The report of ``--report``: one HTML file with figures, without scripts and external resources. Pure."""

from __future__ import annotations

import math
import time
from html import escape as escape_html
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..show.visible import visible
from .history import MIN_DELIVERED_BYTES, History, KindNumbers, RankHistory, Sample
from .table import duration, slowest_text

_MB = 1e6
_MAX_RANKS_IN_MAP = 32
_LINKS_SHOWN = 200
_OPERATIONS_SHOWN = 12
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
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}.lines,.bars{width:100%;min-width:600px}
.grid{stroke:#e3e3e3}.curve{fill:none;stroke-linejoin:round}.bar{fill:#4a7ba6}
.frame{fill:none;stroke:#c0392b;stroke-width:2.5}.end{text-anchor:end}.middle{text-anchor:middle}
.legend{font-size:13px}.key{margin-right:12px;white-space:nowrap}
.key i{display:inline-block;width:12px;height:4px;margin-right:5px;vertical-align:middle}
.wide{overflow-x:auto}
"""
_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 34
_CELL = 44
_BAR = 22


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
    parts = [
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
        "<meta http-equiv=\"Content-Security-Policy\" "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>Started {began}, took {duration(facts.took_s)}: {escape(facts.reason)}. "
        f"ringcomm {escape(facts.version)}.</p>",
        _slowest(history, hosts),
    ]  # fmt: skip
    if facts.failure:
        parts.append(f"<h2>Failure</h2><pre>{escape(facts.failure)}</pre>")
    if samples:
        parts += [_ranks(history, hosts, bool(facts.changes)), _curves(history, hosts)]
        parts += [_waiting(history, hosts), _kinds(samples)]
        parts += [_links(history, hosts), _operations(samples)]
    else:
        parts.append(
            "<p>No rank has reported numbers: none has called <code>ringcomm.init()</code>, or the job ended "
            "before the first numbers came.</p>"
        )
    if facts.changes:
        rows = [(f"{at_s:.0f} s", text) for at_s, text in facts.changes]
        parts.append("<h2>Changes of membership</h2>" + _table(("after", "change"), rows, (0, 1)))
    if facts.settings:
        parts.append("<h2>Settings</h2>" + _settings(facts.settings))
    return "".join(parts) + "</body></html>\n"


def _table(
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


def _slowest(history: History, hosts: Mapping[int, str]) -> str:
    slowest = history.slowest(hosts)
    if slowest is None:
        return ""
    text = slowest_text(slowest, history, hosts)
    return f'<p class="slowest">{escape(text[0].upper() + text[1:])}.</p>'


def _ranks(history: History, hosts: Mapping[int, str], has_changed: bool) -> str:
    slowest = history.slowest(hosts)
    rows, slow = [], -1
    present = history.present()
    samples = [row for row in history.samples() if row[0] in present.values()]
    for index, (number, sample) in enumerate(samples):
        elapsed_s = max(sample.elapsed_s, 1e-9)
        if slowest is not None and sample.rank == slowest.rank and present.get(sample.rank) == number:
            slow = index
        rows.append((
            str(sample.rank), hosts.get(number, "?"), str(sample.steps) if sample.steps else "-",
            shown(sample.steps / elapsed_s) if sample.steps else "-", str(sample.calls),
            f"{100 * min(1.0, sample.waited_s / elapsed_s):.0f} %",
            shown(sample.sent_bytes / _MB), shown(sample.received_bytes / _MB),
            duration(sample.elapsed_s),
        ))  # fmt: skip
    titles = (
        "rank", "host", "steps", "steps/s", "collectives", "waited", "sent MB", "received MB", "time",
    )  # fmt: skip
    note = (
        '<p class="note">"waited" is the part of the time in collectives: moving data, or waiting for other '
        "ranks. The slowest rank waits least.</p>"
    )
    if has_changed:
        note += '<p class="note">All numbers of this table are since the last change of the ranks.</p>'
    note += "".join(f'<p class="note">{escape(text)} at the end.</p>' for text in history.local_steps())
    return "<h2>Ranks</h2>" + _table(titles, rows, (1, 9), slow) + note


def _curves(history: History, hosts: Mapping[int, str]) -> str:
    slowest = history.slowest(hosts)
    present = history.present()
    by_number = {number: rank for rank, number in present.items()}
    steps: List[Curve] = []
    waited: List[Curve] = []
    sent: List[Curve] = []
    has_steps = any(sample.steps for _, sample in history.samples())
    for number, process in sorted(history.processes.items()):
        rank = by_number.get(number, number)
        label = f"rank {rank} ({hosts.get(number, '?')})"
        bold = slowest is not None and number in by_number and rank == slowest.rank
        style = (colour_of(number), bold)
        points = process.points
        steps.append(Curve(label, _steps_or_calls(process, has_steps), *style))
        waited.append(Curve(label, [(item.at_s, 100 * item.rates.waited) for item in points], *style))
        sent.append(Curve(label, [(item.at_s, item.rates.sent_bytes / _MB) for item in points], *style))
    title, what = ("Steps", "steps/s") if has_steps else ("Collectives", "collectives/s")
    return (
        f"<h2>{title} per second</h2>{_wide(diagram(steps, 'seconds', what))}"
        f"<h2>Part of the time in collectives</h2>{_wide(diagram(waited, 'seconds', '%'))}"
        f"<h2>Sent</h2>{_wide(diagram(sent, 'seconds', 'MB/s'))}"
    )


def _steps_or_calls(process: RankHistory, steps: bool) -> List[Tuple[float, float]]:
    return [(item.at_s, item.rates.steps if steps else item.rates.calls) for item in process.points]


def _waiting(history: History, hosts: Mapping[int, str]) -> str:
    matrix, slowest = history.matrix(), history.slowest(hosts)
    ranks = sorted(history.present())
    if len(ranks) < 2:
        return ""
    note = (
        '<p class="note">Seconds that the rank of the row has waited for data of the rank of the column, '
        "which may have waited itself meanwhile.</p>"
    )
    if len(ranks) <= _MAX_RANKS_IN_MAP:
        marked = None if slowest is None else slowest.rank
        return f"<h2>Waiting between ranks</h2>{_wide(heat_map(ranks, matrix, marked, 'seconds'))}{note}"
    sums = {rank: sum(matrix.get((other, rank), 0.0) for other in ranks) for rank in ranks}
    top = sorted(ranks, key=lambda rank: -sums[rank])[:_OPERATIONS_SHOWN]
    rows = [(str(rank), f"{sums[rank]:.1f}") for rank in top]
    return "<h2>Ranks that others waited for</h2>" + _table(("rank", "seconds of all other ranks"), rows)


def _sum(tables: Sequence[Mapping[str, KindNumbers]]) -> Dict[str, KindNumbers]:
    found: Dict[str, KindNumbers] = {}
    for table in tables:
        for name, item in table.items():
            before = found.get(name, KindNumbers())
            found[name] = KindNumbers(
                before.runs + item.runs, before.took_s + item.took_s, before.moved_bytes + item.moved_bytes
            )
    return found


def _kinds(samples: Sequence[Tuple[int, Sample]]) -> str:
    kinds = _sum([sample.kinds for _, sample in samples])
    values = {
        kind: item.moved_bytes / 2 / _MB  # each byte is sent by one rank and received by another one
        for kind, item in sorted(kinds.items(), key=lambda pair: -pair[1].moved_bytes)
    }
    return f"<h2>Bytes by kind of collective</h2>{_wide(bars(values, 'MB'))}" if values else ""


def _links(history: History, hosts: Mapping[int, str]) -> str:
    rows = []
    present = history.present()
    for rank, number in sorted(present.items()):
        process = history.processes[number]
        sample = process.latest
        assert sample is not None
        elapsed_s = max(sample.elapsed_s, 1e-9)
        for other, peer in sorted(sample.peers.items()):
            enough = peer.busy_s and peer.delivered_bytes >= MIN_DELIVERED_BYTES
            speed = peer.delivered_bytes / peer.busy_s / _MB if enough else 0.0
            rows.append((
                f"{rank} ({hosts.get(number, '?')})", f"{other} ({hosts.get(present.get(other, -1), '?')})",
                _interfaces(history, rank, other),
                shown(peer.sent_bytes / _MB), shown(peer.sent_bytes / _MB / elapsed_s),
                shown(process.peak_bytes.get(other, 0.0) / _MB),
                f"{speed:.3g}" if speed else "-",
                f"{100 * min(1.0, peer.busy_s / elapsed_s):.0f} %" if speed else "-",
            ))  # fmt: skip
    if not rows:
        return ""
    more = f"<p>and {len(rows) - _LINKS_SHOWN} more</p>" if len(rows) > _LINKS_SHOWN else ""
    titles = (
        "from rank", "to rank", "interfaces", "MB", "MB/s on average", "MB/s at most", "MB/s while busy",
        "busy",
    )  # fmt: skip
    note = (
        '<p class="note">"at most": the highest average over about a second. "busy": while the TCP '
        "connection had something to send, as the system counts it; inside a host nothing is counted.</p>"
    )
    return f"<h2>Links</h2>{_table(titles, rows[:_LINKS_SHOWN], (0, 1, 2))}{more}{note}"


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
    rows = [
        (name, str(item.runs), f"{item.took_s:.2f}", f"{1e3 * item.took_s / max(1, item.runs):.3g}",
         shown(item.moved_bytes / 2 / _MB))
        for name, item in ((name, found[name]) for name in names)
    ]  # fmt: skip
    titles = ("operation", "runs of all ranks", "seconds", "ms each", "MB")
    return "<h2>Operations that took longest</h2>" + _wide(_table(titles, rows, (0,)), " names")


def _settings(settings: Sequence[Tuple[str, str, str]]) -> str:
    chosen = [row for row in settings if row[2] != "default"]
    rest = [row for row in settings if row[2] == "default"]
    titles = ("setting", "value", "set by")
    own = _table(titles, chosen, (0, 1, 2)) if chosen else "<p>All have their defaults.</p>"
    others = _table(titles[:2], [row[:2] for row in rest], (0, 1))
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


def colour_of(index: int) -> str:
    """Return a colour for the rank with this number; neighbours differ clearly."""
    return f"hsl({(index * 137) % 360},60%,{40 + 12 * (index % 2)}%)"


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


def heat_map(
    ranks: Sequence[int], values: Mapping[Tuple[int, int], float], marked: Optional[int], title: str
) -> str:
    """Return a table of numbers by (row, column), darker if larger; the column `marked` has a frame."""
    most = max([values.get((row, column), 0.0) for row in ranks for column in ranks], default=0.0)
    side = _CELL * (len(ranks) + 1) + 10
    parts = [f'<svg class="map" viewBox="0 0 {side} {side}" width="{side}" role="img" '
             f'aria-label="{escape(title)}">']  # fmt: skip
    for index, rank in enumerate(ranks):
        place = _CELL * (index + 1) + _CELL / 2
        bold = ' font-weight="bold"' if rank == marked else ""
        parts.append(f'<text x="{place}" y="{_CELL - 10}" class="middle"{bold}>{rank}</text>')
        parts.append(f'<text x="{_CELL - 10}" y="{place + 4}" class="end">{rank}</text>')
    for row_index, row in enumerate(ranks):
        for column_index, column in enumerate(ranks):
            if row != column:
                value = values.get((row, column), 0.0)
                parts.append(_cell(column_index, row_index, value, value / most if most else 0.0))
    if marked in ranks:
        x = _CELL * (ranks.index(marked) + 1)
        size = _CELL * len(ranks)
        parts.append(f'<rect x="{x}" y="{_CELL}" width="{_CELL}" height="{size}" class="frame"/>')
    return "".join(parts) + "</svg>"


def _cell(column: int, row: int, value: float, share: float) -> str:
    x, y = _CELL * (column + 1), _CELL * (row + 1)
    colour = "#fff" if share > 0.55 else "#222"
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" '
        f'fill="rgb({250 - 90 * share:.0f},{245 - 190 * share:.0f},{240 - 200 * share:.0f})"/>'
        f'<text x="{x + _CELL / 2 - 1}" y="{y + _CELL / 2 + 3}" class="middle" fill="{colour}">'
        f"{round(value, 2):.3g}</text>"
    )


def bars(values: Dict[str, float], unit: str) -> str:
    """Return horizontal bars with their labels."""
    most = max(values.values(), default=0.0)
    height = _BAR * len(values) + 6
    parts = [f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(unit)}">']
    for index, (label, value) in enumerate(values.items()):
        y, width = _BAR * index + 3, 420 * value / most if most else 0.0
        parts.append(f'<text x="170" y="{y + 14}" class="end">{escape(label)}</text>')
        parts.append(f'<rect x="178" y="{y}" width="{width:.1f}" height="{_BAR - 5}" class="bar"/>')
        parts.append(f'<text x="{184 + width:.1f}" y="{y + 14}">{shown(value)} {escape(unit)}</text>')
    return "".join(parts) + "</svg>"
