"""The warning of a range that is known to be too short, and the numbers of prompt groups."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.estimators.bootstrap import (
    effective_of_all,
    interval_warning,
)


def test_warning_names_the_number_and_the_threshold() -> None:
    heavy = {"prompt_groups": 8, "effective_groups": 5.2, "pareto_k": 0.1, "pareto_k_inverse": 0.42}
    assert (interval_warning(heavy) or "").startswith(
        "The tail of d has the shape k̂ = 0.42, above 0.3: tokens too rare for this batch"
    )
    assert "4 prompt groups: a range of k3 needs 5" in (interval_warning({**heavy, "prompt_groups": 4}) or "")
    assert interval_warning({**heavy, "pareto_k_inverse": None}) is None
    assert interval_warning({}) is None


def test_effective_groups_are_shown_with_the_number_of_groups() -> None:
    assert effective_of_all({"effective_groups": 5.23, "prompt_groups": 8}) == "5.2 of 8"
    assert effective_of_all({"effective_groups": None, "prompt_groups": 8}) == "–"


def statistics_of(scales: np.ndarray, degrees: int) -> ComparisonStatistics:
    """Return the statistics of one rollout of 4,000 tokens per group, with d = scale · Student's t."""
    random = np.random.default_rng(11)
    d = 0.01 * np.repeat(scales, 4000) * random.standard_t(degrees, scales.size * 4000)
    behaviour = np.full(d.size, -5.0)
    offsets = np.arange(scales.size + 1) * 4000
    return ComparisonStatistics.of(behaviour + d, behaviour, offsets, group_ids=range(scales.size))


def test_measures_of_even_and_of_uneven_groups() -> None:
    even = statistics_of(np.ones(8), 30).measures()
    assert even["prompt_groups"] == 8
    assert 7.5 < even["effective_groups"] <= 8.0
    assert interval_warning(even) is None
    uneven = statistics_of(np.array([10.0] + [1.0] * 7), 30).measures()
    assert 1.0 < uneven["effective_groups"] < 1.4
    heavy = statistics_of(np.ones(8), 2).measures()
    assert "may lie far above" in (interval_warning(heavy) or "")


def test_effective_groups_do_not_depend_on_shards() -> None:
    scales = np.array([1.0, 2.0, 0.5, 1.5, 1.0, 3.0])
    whole = statistics_of(scales, 5)
    merged = statistics_of(scales, 5).merge(statistics_of(scales, 5))
    assert merged.measures()["effective_groups"] == pytest.approx(whole.measures()["effective_groups"])
    assert merged.measures()["prompt_groups"] == 6
