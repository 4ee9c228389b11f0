"""Tests of curves as SVG: what is drawn, and that long curves keep their peaks."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreshock.commands.report_page import HEIGHT, WIDTH, Mark, Series, svg_curve

NUMBERS = re.compile(r"-?\d+(?:\.\d+)?")


def points(svg: str, of_class: str) -> list[tuple[float, float]]:
    """Return the points of the path of a class."""
    found = re.search(rf'class="{of_class}" d="([^"]*)"', svg)
    assert found is not None
    numbers = [float(text) for text in NUMBERS.findall(found[1])]
    return list(zip(numbers[0::2], numbers[1::2], strict=False))


def test_a_peak_of_one_step_in_ten_thousand_is_drawn() -> None:
    values = np.ones(10_000)
    values[6_321] = 9.0
    svg = svg_curve("k3", range(10_000), [Series("k3", values.tolist())])
    heights = [y for _, y in points(svg, "line series-1")]
    assert min(heights) < HEIGHT / 3
    assert len(heights) < 4 * WIDTH
    assert max(heights) > HEIGHT / 2


def test_values_that_a_logarithm_does_not_have_are_left_out() -> None:
    svg = svg_curve("k3", [1, 2, 3, 4], [Series("k3", [1e-5, 0.0, -1.0, 1e-3])], logarithmic=True)
    assert len(points(svg, "line series-1")) == 2
    assert svg_curve("k3", [1, 2], [Series("k3", [0.0, math.nan])], logarithmic=True) == ""
    assert svg_curve("k3", [], [Series("k3", [])]) == ""


def test_thresholds_and_marks_are_drawn_where_they_fit() -> None:
    svg = svg_curve(
        "k3", [10, 20], [Series("k3", [1e-4, 1e-2])], logarithmic=True,
        thresholds=[Mark(1e-3, "warning", "above 1e-3"), Mark(5.0, "critical", "far above")],
        marks=[Mark(15, "critical", "a <rule>"), Mark(99, "info", "later")],
    )  # fmt: skip
    root = ElementTree.fromstring(svg)
    lines = {element.get("class"): element for element in root.iter("line")}
    assert "threshold warning" in lines
    assert "threshold critical" not in lines
    assert lines["mark critical"].findtext("title") == "a <rule>"
    assert "mark info" not in lines


def test_a_constant_has_an_axis_of_its_own_size() -> None:
    texts = re.findall(r">([^<]+)</text>", svg_curve("cut", [1, 2], [Series("cut", [0.0, 0.0])]))
    assert "0" in texts
    assert not any("e-" in text for text in texts)
    texts = re.findall(r">([^<]+)</text>", svg_curve("k3", [1, 2], [Series("k3", [1e-5, 1e-2])], logarithmic=True))
    assert {"1e-5", "1e-4", "1e-3", "0.01"} <= set(texts)


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=40),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_values_give_well_formed_svg_inside_its_box(values: list[float], logarithmic: bool, first: int) -> None:
    steps = range(first, first + len(values))
    series = Series("any", values, [value / 2 for value in values], [value * 2 for value in values])
    svg = svg_curve('<any> & "every"', steps, [series], logarithmic=logarithmic)
    if not svg:
        return
    ElementTree.fromstring(svg)
    for x, y in points(svg, "line series-1"):
        assert -1 <= x <= WIDTH + 1
        assert -1 <= y <= HEIGHT + 1
