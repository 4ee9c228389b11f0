"""Tests of text for terminals: numbers, sparklines, tables, wrapping."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.commands.text import WIDTH, Paint, count, number, sparkline, table, wrap


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (1.0, "1.00"), (-0.25, "-0.250"), (123.456, "123"), (99_999.0, "99999"), (0.001, "0.00100"),
        (0.00099, "9.90e-4"), (1.25e-5, "1.25e-5"), (-3e12, "-3.00e12"), (math.nan, "–"), (math.inf, "–"), (None, "–"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, shown: str) -> None:
    assert number(value) == shown


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30), st.integers(1, 6))
def test_number_has_the_requested_digits(value: float, digits: int) -> None:
    assert float(number(value, digits)) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits), abs=1e-300)


def test_counts_and_times() -> None:
    assert (count(1234567), count(None)) == ("1,234,567", "–")


def test_sparkline_spans_minimum_to_maximum() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1e-5, 1e-4, 1e-3], 8, logarithmic=True) == sparkline([1, 2, 3], 8)


def test_flat_line_is_in_the_middle_and_zero_at_the_bottom() -> None:
    assert sparkline([3.0, 3.0], 8) == "▄▄"
    assert sparkline([0.0, 0.0], 8) == "▁▁"


def test_gaps_stay_gaps() -> None:
    assert sparkline([1.0, math.nan, 2.0], 8) == "▁ █"
    assert sparkline([math.nan] * 3, 8) == "   "
    assert sparkline([], 8) == ""


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 60))
def test_narrow_sparkline_keeps_peaks(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    if max(values) > min(values):
        drawn_peak = max(range(len(line)), key=lambda index: line[index])
        peak = values.index(max(values)) * len(line) / len(values)
        assert line[drawn_peak] == "█" or len(set(line)) == 1
        assert "█" not in line or any(character == "█" for character in line[max(0, int(peak) - 1) : int(peak) + 2])


def test_table_is_aligned() -> None:
    assert table(["name", "value"], [["a", "1"], ["bcdef", "23"]]) == [
        "  name   value",
        "  a          1",
        "  bcdef     23",
    ]


@given(st.text(st.characters(codec="ascii", categories=["L", "Zs"]), max_size=400))
def test_wrapped_lines_fit(text: str) -> None:
    assert all(len(line) <= WIDTH for line in wrap(text, "    ", "  ! "))


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Paint(io.StringIO())("critical", "critical") == "critical"
    assert Paint(Terminal())("critical", "critical") == "\x1b[31;1mcritical\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Paint(Terminal())("critical", "critical") == "critical"
