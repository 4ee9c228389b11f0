"""verl's thirteen metrics alone equal those of all measures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import compute_verl_metrics
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from tests.foreshock.measures.passes.compiled.test_equal_to_numpy import batch


@pytest.mark.parametrize("size", [1e-6, 1e-2, 3.0])
@pytest.mark.parametrize("columns", [frozenset[str](), frozenset({"generated"})])
def test_verl_metrics_equal_those_of_the_statistics(size: float, columns: frozenset[str]) -> None:
    inputs = batch(7, [0, 3, 700, 40, 513], size, np.float32, 0.02, columns, "none")
    expected = ComparisonStatistics.from_rollout_sums(sum_rollouts_numpy(inputs), None).measures()
    found = compute_verl_metrics(inputs)
    assert len(found) == 13
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-15), name


def test_verl_metrics_without_tokens_are_nan() -> None:
    nothing = np.full(3, np.nan)
    found = compute_verl_metrics(TokenInputs(nothing, nothing, np.array([0, 3])))
    assert all(math.isnan(value) for value in found.values())
    no_rollouts = compute_verl_metrics(TokenInputs(nothing[:0], nothing[:0], np.zeros(1, np.int64)))
    assert all(math.isnan(value) for value in no_rollouts.values())
