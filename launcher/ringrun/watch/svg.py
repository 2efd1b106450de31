"""Figures of the report as inline SVG. Pure."""

from __future__ import annotations

import math
from html import escape as escape_html
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..show.visible import visible

_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 34
_CELL = 44
_BAR = 22


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


def number(value: float) -> str:
    """Return a number at an axis or in a cell; below a thousandth it is 0.

    >>> number(0.25), number(12.0), number(2500.0), number(0.01234), number(0.0001)
    ('0.25', '12', '2500', '0.012', '0')
    """
    if abs(value) < 0.1:
        return f"{round(value, 3):g}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def lines(curves: Sequence[Curve], x_title: str, y_title: str) -> str:
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
        parts.append(f'<text x="{_LEFT - 6}" y="{y_of(y) + 4:.1f}" class="end">{number(y)}</text>')
    for x in x_ticks:
        parts.append(f'<text x="{x_of(x):.1f}" y="{_HEIGHT - 18}" class="middle">{number(x)}</text>')
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
        parts.append(f'<text x="{184 + width:.1f}" y="{y + 14}">{number(value)} {escape(unit)}</text>')
    return "".join(parts) + "</svg>"
