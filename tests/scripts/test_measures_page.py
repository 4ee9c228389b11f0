"""The page of measures is current and complete."""

from __future__ import annotations

import re
from collections import Counter

from foreshock.measures.registry import MEASURES, Measure
from foreshock.measures.statistics.conditions import CONDITIONS
from scripts.measures_page import HEAD, PAGE, measure_row, page, sections


def cells(line: str) -> list[str]:
    """Return the cells of a table row."""
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m scripts.measures_page"


def test_every_measure_is_in_one_section() -> None:
    listed = Counter(measure.name for _, measures in sections() for measure in measures)
    assert listed == Counter(measure.name for measure in MEASURES)
    assert all(measures for _, measures in sections())


def test_row_holds_every_field_of_the_registry() -> None:
    for measure in MEASURES:
        expected = [measure.formula, measure.unit, measure.direction, measure.aggregation, measure.source]
        assert cells(measure_row(measure)) == [f"`{measure.column}`", *expected]


def test_bars_in_formulas_do_not_break_the_table() -> None:
    measure = Measure("x", "|d| > 1", "1", "", "token mean", "comparison", "Foreshock")
    assert len(cells(measure_row(measure))) == len(HEAD)
    assert cells(measure_row(measure))[1] == "|d| > 1"


def test_contents_link_to_headings_and_every_condition_is_listed() -> None:
    text = page()
    headings = {
        "".join(letter for letter in heading.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
        for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links
    assert links <= headings
    assert all(f"| `{name}` |" in text for name in CONDITIONS)
