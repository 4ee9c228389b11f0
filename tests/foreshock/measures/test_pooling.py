"""Pooled means: Σ sums / Σ tokens over a window, with each prompt of each step as a cluster."""

import dataclasses
import math

import numpy as np
import pytest

from foreshock.measures.estimators.bootstrap import MORE_RESAMPLES, nonnegative_intervals
from foreshock.measures.pooling import pool_over_steps, pool_summaries
from foreshock.measures.rollout_summaries import RolloutSummaries
from tests.foreshock.batches import compared, random_batch


def summaries(seed: int, rollouts: int = 24) -> RolloutSummaries:
    batch = random_batch(seed, rollouts)
    batch = dataclasses.replace(batch, group_ids=[f"prompt-{row // 4}" for row in range(rollouts)])
    return compared(batch).summaries


def test_mean_is_over_all_tokens_of_the_window() -> None:
    steps = [summaries(seed) for seed in range(3)]
    found = pool_summaries(steps, ["k3_kl", "rollout_probs_diff_mean"])
    tokens = sum(step.column("n_tokens").sum() for step in steps)
    assert found["k3_kl"].mean == pytest.approx(sum(step.column("sum_k3").sum() for step in steps) / tokens, rel=1e-12)
    assert found["rollout_probs_diff_mean"].mean == pytest.approx(
        sum(step.column("sum_abs_probability_difference").sum() for step in steps) / tokens, rel=1e-12
    )


def test_each_prompt_of_each_step_is_a_cluster() -> None:
    # The same prompts at two steps are twelve clusters, not six.
    found = pool_summaries([summaries(0), summaries(1)], ["k3_kl"])["k3_kl"]
    assert found.clusters == 12
    assert 1 <= found.effective <= 12
    assert 0 <= found.low < found.mean < found.high


def test_interval_is_that_of_the_clusters_sums() -> None:
    steps = [summaries(0), summaries(1)]
    tables = []
    for step in steps:
        for prompt in range(6):
            rows = np.flatnonzero(step.clusters() == prompt + 1)
            tables.append((step.column("sum_k3")[rows].sum(), step.column("n_tokens")[rows].sum()))
    sums, tokens = np.array(tables).T
    (expected,) = nonnegative_intervals(sums[:, None], tokens, resamples=MORE_RESAMPLES)
    found = pool_summaries(steps, ["k3_kl"])["k3_kl"]
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_means_of_steps_are_weighted_by_tokens() -> None:
    found = pool_over_steps(np.array([1.0, 3.0, math.nan]), np.array([100.0, 300.0, 50.0]))
    assert (found.mean, found.clusters) == (2.5, 2)
    assert math.isnan(found.low)
    wide = pool_over_steps(np.linspace(1.0, 2.0, 10), np.full(10, 100.0))
    assert wide.low < 1.5 < wide.high


def test_empty_window_has_no_mean() -> None:
    assert math.isnan(pool_summaries([], ["k3_kl"])["k3_kl"].mean)
    assert math.isnan(pool_over_steps(np.array([]), np.array([])).mean)
