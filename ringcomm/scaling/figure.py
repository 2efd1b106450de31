"""Line charts in SVG, written without a library."""

from __future__ import annotations

from html import escape
from math import log2
from typing import Iterator, List, NamedTuple, Sequence, Tuple

COLOURS = ("#d1495b", "#2e4057", "#66a182", "#edae49", "#6c8ead", "#9467bd", "#8c564b", "#17becf", "#7f7f7f",
           "#bcbd22", "#e377c2")  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 790, 400, 64, 266, 40, 54
_MAX_TICKS = 12


class Line(NamedTuple):
    """One line or set of points.

    Attributes:
        name: for the legend.
        points: pairs of x and y, of which x is positive.
        colour: like ``#d1495b``; empty: the next of the palette.
        dashed: for what was simulated, beside what was measured.
        marks: draw the points.
        joined: draw the line through them.
    """

    name: str
    points: Tuple[Tuple[float, float], ...]
    colour: str = ""
    dashed: bool = False
    marks: bool = True
    joined: bool = True


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    y_from_zero: bool = False,
    y_log: bool = False,
) -> str:
    """A chart with a logarithmic x axis.

    Args:
        title: above the chart.
        x_label, y_label: names of the axes.
        lines: with at least one point in all.
        y_from_zero: let the y axis begin at zero.
        y_log: make the y axis logarithmic, too.

    Returns:
        the picture as text.
    """
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = (0.0 if y_from_zero else min(ys)), max(ys)
    if y_log:
        low, high = log2(min(ys)), log2(high)
    span = (high - low) or 1.0
    first, last = log2(xs[0]), log2(xs[-1])

    def x_of(x: float) -> float:
        return _LEFT + (log2(x) - first) / ((last - first) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        place = log2(y) if y_log else y
        return _TOP + (1 - (place - low) / span) * (_HEIGHT - _TOP - _BOTTOM)

    parts = list(_frame(title, x_label, y_label))
    parts += [_text(x_of(x), _HEIGHT - _BOTTOM + 18, _number(x), "middle") for x in _ticks(xs)]
    for step in range(6):
        value = low + span * step / 5
        shown = 2.0**value if y_log else value
        y = y_of(shown)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(shown), "end"))
    for number, line in enumerate(lines):
        colour = line.colour or COLOURS[number % len(COLOURS)]
        places = [(x_of(x), y_of(y)) for x, y in line.points]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        if line.joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if line.marks:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts += _legend(number, line, colour, dash)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(title: str, x_label: str, y_label: str) -> Iterator[str]:
    middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    yield f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>'
    yield _text(middle_x, _HEIGHT - 12, x_label, "middle")
    turned = f'transform="rotate(-90 16 {middle_y:.0f})"'
    yield f'<text x="16" y="{middle_y:.0f}" text-anchor="middle" {turned}>{escape(y_label)}</text>'


def _legend(number: int, line: Line, colour: str, dash: str) -> List[str]:
    x, y = _WIDTH - _RIGHT + 14, _TOP + 8 + 20 * number
    parts = []
    if line.joined:
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>'
        )
    if line.marks:
        parts.append(f'<circle cx="{x + 12}" cy="{y}" r="3.5" fill="{colour}"/>')
    return [*parts, _text(x + 30, y + 4, line.name, "start")]


def _ticks(xs: Sequence[float]) -> List[float]:
    """Those of the values, which are ascending, that stand far enough from the one before."""
    apart = (log2(xs[-1]) - log2(xs[0])) / _MAX_TICKS
    found = list(xs[:1])
    for x in xs[1:]:
        if log2(x) - log2(found[-1]) >= apart:
            found.append(x)
    return found


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
