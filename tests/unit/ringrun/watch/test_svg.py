"""Axes and figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ringrun.watch.svg import Curve, heat_map, lines, ticks


@pytest.mark.parametrize("most", [1e-9, 0.03, 0.9, 1.0, 7.3, 10.0, 99.9, 1234.0, 8.1e12])
def test_ticks_are_round_and_reach_the_largest_value(most):
    found = ticks(most)
    assert found[0] == 0.0 and found[-1] >= most * 0.999 and 3 <= len(found) <= 7
    assert found[-2] < most


def test_a_curve_goes_from_left_to_right_and_up():
    figure = lines([Curve("<rank 0>", [(0.0, 0.0), (5.0, 10.0)], "red", True)], "seconds", "MB/s")
    svg = figure[: figure.index("</svg>") + 6]
    ElementTree.fromstring(svg)
    path = re.search(r'class="curve" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    assert path is not None
    x0, y0, x1, y1 = map(float, path.groups())
    assert x0 < x1 and y0 > y1
    assert "&lt;rank 0&gt;" in figure and "<b>" in figure


def test_the_marked_column_has_a_frame():
    values = {(0, 1): 5.0, (1, 0): 0.5}
    framed = heat_map([0, 1], values, 1, "seconds")
    ElementTree.fromstring(framed)
    assert framed.count('class="frame"') == 1 and ">5<" in framed
    assert 'class="frame"' not in heat_map([0, 1], values, None, "seconds")
