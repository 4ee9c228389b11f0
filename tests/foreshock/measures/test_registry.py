"""The registry names every measure once, and each is computed."""

import re

import pytest

from foreshock.measures import MEASURES, measure_named, measure_step
from foreshock.measures.registry import COMPARISON_MEASURES, STEP_MEASURES
from tests.foreshock.batches import random_batch


def test_names_and_columns_are_unique_and_columns_are_identifiers() -> None:
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)
    assert len({measure.column for measure in MEASURES}) == len(MEASURES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", measure.column) for measure in MEASURES)
    # PostgreSQL truncates longer names silently.
    assert max(len(measure.column) for measure in MEASURES) < 63


def test_computed_measures_equal_registered_measures() -> None:
    measurement = measure_step(random_batch(0))
    comparison = measurement.comparisons["trainer/rollout"]
    computed = comparison.measures()
    assert set(comparison.statistics.measures()) == set(computed)
    assert set(computed) == {measure.column for measure in COMPARISON_MEASURES}
    assert set(measurement.step.measures()) == {measure.column for measure in STEP_MEASURES}
    for measure in MEASURES:
        values = computed if measure.kind != "step" else measurement.step.measures()
        expected = int if measure.column_type == "integer" else float
        assert isinstance(values[measure.column], expected), measure.name


def test_every_measure_has_formula_unit_and_source() -> None:
    for measure in MEASURES:
        assert measure.formula, measure.name
        assert measure.unit, measure.name
        assert measure.aggregation, measure.name
        assert measure.source, measure.name
        if measure.kind == "comparison" and measure.column_type == "float":
            assert measure.direction, measure.name


def test_measure_is_found_by_name_and_by_column() -> None:
    assert measure_named("tail(2)") is measure_named("tail_2")
    with pytest.raises(KeyError):
        measure_named("tail(3)")
