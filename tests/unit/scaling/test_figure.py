"""Line charts: well-formed, with every point inside."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ringcomm.scaling.figure import Line, line_chart

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("y_log", [False, True])
def test_every_point_is_drawn_inside_the_picture(y_log):
    lines = [Line("a < b", ((2, 10), (4, 20), (16, 5))), Line("simulated", ((2, 1), (4096, 30)), dashed=True)]
    root = ElementTree.fromstring(line_chart("title & more", "x", "y", lines, y_log=y_log))
    width, height = float(root.get("width")), float(root.get("height"))
    circles = root.findall(f"{SPACE}circle")
    assert len(circles) == 5 + 2  # the points, and one of each line in the legend
    for circle in circles:
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height
    texts = [item.text for item in root.findall(f"{SPACE}text")]
    assert {"title & more", "a < b", "simulated"} <= set(texts)
    dashed = [item for item in root.findall(f"{SPACE}polyline") if item.get("stroke-dasharray")]
    assert len(dashed) == 1


def test_larger_values_are_higher():
    text = line_chart("t", "x", "y", [Line("a", ((1, 1), (2, 3)))], y_from_zero=True)
    heights = [float(found) for found in re.findall(r'circle cx="[\d.]+" cy="([\d.]+)"', text)]
    assert heights[0] > heights[1]


def test_points_without_a_line_and_one_point_alone():
    root = ElementTree.fromstring(line_chart("t", "x", "y", [Line("a", ((8, 5),), joined=False)]))
    assert root.findall(f"{SPACE}polyline") == []


def test_labels_of_values_that_are_close_do_not_overlap():
    points = tuple((1.0 + 0.01 * number, number + 1) for number in range(100))
    root = ElementTree.fromstring(line_chart("t", "x", "y", [Line("a", (*points, (64.0, 3)))]))
    places = [
        float(item.get("x"))
        for item in root.findall(f"{SPACE}text")
        if item.get("text-anchor") == "middle" and item.text != "x"
    ]
    assert len(places) > 2
    assert all(after - before > 30 for before, after in zip(places, places[1:]))
