"""The page of measures is current and complete."""

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
        column, formula, direction, aggregation = cells(measure_row(measure))
        assert column == f"`{measure.column}`"
        assert formula.startswith(measure.formula)
        assert measure.unit == "1" or formula.endswith(measure.unit)
        assert direction == measure.direction
        assert (measure.aggregation in aggregation) == (measure.aggregation != "token mean")
        assert (measure.source in aggregation) == (measure.source != "Foreshock")


def test_bars_in_formulas_do_not_break_the_table() -> None:
    measure = Measure("x", "|d| > 1", "1", "", "token mean", "comparison", "Foreshock")
    assert len(cells(measure_row(measure))) == len(HEAD)
    assert cells(measure_row(measure))[1] == "|d| > 1"


def test_every_condition_is_listed() -> None:
    assert all(f"| `{name}` |" in page() for name in CONDITIONS)
