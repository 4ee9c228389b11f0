"""Clustered intervals: Student's t against tables, nominal coverage, dependence within groups."""

import math

import numpy as np
import pytest

from foreshock.measures.estimators.intervals import Interval, student_t_quantile
from tests.foreshock.measures.clustered import clustered_interval


@pytest.mark.parametrize(
    ("degrees", "table"),
    [
        (1, 12.706205), (2, 4.302653), (5, 2.570582), (10, 2.228139), (30, 2.042272), (120, 1.979930),
        (100_000, 1.959988),
    ],
)  # fmt: skip
def test_student_t_quantiles_equal_published_tables(degrees: int, table: float) -> None:
    assert student_t_quantile(0.975, degrees) == pytest.approx(table, rel=1e-6)


def test_intervals_cover_the_true_mean_at_the_nominal_rate() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        tokens = generator.integers(5, 50, 48)
        of_groups = np.repeat(generator.normal(1.0, 0.5, 12), 4)
        sums = generator.normal(of_groups * tokens, np.sqrt(tokens))
        found = clustered_interval(sums, tokens, np.repeat(np.arange(12), 4))
        held += found.low <= 1.0 <= found.high
    assert 0.92 < held / 2000 < 0.97


def test_one_cluster_has_no_interval_and_no_cluster_no_mean() -> None:
    one = clustered_interval(np.array([2.0, 4.0]), np.array([2, 2]), np.array([7, 7]))
    assert one.mean == 1.5
    assert math.isnan(one.low)
    assert one.clusters == 1
    none = clustered_interval(np.zeros(2), np.zeros(2, int))
    assert math.isnan(none.mean)
    assert isinstance(none, Interval)
