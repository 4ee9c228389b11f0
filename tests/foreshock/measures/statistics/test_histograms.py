"""Fixed grids: every value in its bin, bins about one percent wide, quantiles to a bin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures import ComparisonStatistics
from foreshock.measures.statistics.histograms import LENGTH_GRID, LOG_RATIO_GRID, LengthStatistics
from tests.foreshock.batches import compared, random_batch


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_value_lies_between_the_edges_of_its_bin(value: float) -> None:
    for grid in (LOG_RATIO_GRID, LENGTH_GRID):
        index = int(grid.bins(np.array([value]))[0])
        assert grid.lower_edge(index) <= value < grid.upper_edge(index)


def test_grid_of_differences_is_about_one_percent_fine() -> None:
    edges = LOG_RATIO_GRID.edges()[1:-1]
    widths = np.diff(edges) / edges[:-1]
    assert 0.007 < widths.min() < widths.max() < 0.016
    assert edges[0] < 1e-8
    assert edges[-1] > 100
    assert edges.size + 1 == LOG_RATIO_GRID.size


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_of_short_lengths_are_exact(lengths: list[int], fraction: float) -> None:
    (found,) = LengthStatistics.of(np.array(lengths)).quantiles((fraction,))
    assert found == np.quantile(lengths, fraction, method="inverted_cdf")


@settings(deadline=None)
@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_of_long_lengths_are_within_half_a_percent(lengths: list[int], fraction: float) -> None:
    (found,) = LengthStatistics.of(np.array(lengths)).quantiles((fraction,))
    assert found == pytest.approx(np.quantile(lengths, fraction, method="inverted_cdf"), rel=0.004)


def test_quantiles_of_differences_come_from_the_grid() -> None:
    batch = random_batch(0, 60, 200, 1e-5, 10.0)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    statistics = compared(batch).statistics
    d = np.subtract(batch.trainer_log_probs, batch.rollout_log_probs, dtype=np.float64)[batch.generated]
    measures = statistics.measures()
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        exact = np.quantile(np.abs(d), fraction, method="inverted_cdf")
        assert measures[f"{name}_abs_d"] == pytest.approx(exact, rel=0.008)
    ends = ComparisonStatistics.of([-1e-9, -1e-9, -500.0], [0.0, 0.0, 0.0], [0, 3]).measures()
    assert (ends["p50_abs_d"], ends["p99_abs_d"], ends["max_abs_d"]) == (0.0, 128.0, 500.0)
