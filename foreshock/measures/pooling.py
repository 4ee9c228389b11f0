"""Means pooled over a window of steps, Σ sums / Σ tokens, with intervals over prompt × step.

A window's pooled mean estimates the mean over its tokens. The median of its steps does not: most of k3 can come from
few prompts, which most steps lack; on uneven prompts the median was 8.6 times below the pooled mean. Each step draws
new prompts, so each prompt of each step is a cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators.bootstrap import MORE_RESAMPLES, effective_number, nonnegative_intervals
from foreshock.measures.rollout_summaries import RolloutSummaries

Float64 = NDArray[np.float64]

CLUSTERED_BY_PROMPT = {"k3_kl": "sum_k3", "rollout_probs_diff_mean": "sum_abs_probability_difference"}
"""Token means whose sums are in the rollout summaries, with their columns."""


@dataclass(frozen=True, slots=True)
class PooledMean:
    """A token mean over a window; the ends of its interval are NaN if there are too few clusters.

    `effective` is the effective number of clusters, (Σ S)²/Σ S².
    """

    mean: float
    low: float
    high: float
    clusters: int
    effective: float


_UNKNOWN = PooledMean(math.nan, math.nan, math.nan, 0, math.nan)


def pool_summaries(steps: Sequence[RolloutSummaries], measures: Sequence[str]) -> dict[str, PooledMean]:
    """Return the pooled means of `measures`, keys of CLUSTERED_BY_PROMPT; clusters are prompt × step.

    The same rollouts give the same intervals, whatever their order within a step.
    """
    tables = [part for step in steps if (part := _sums_of_prompts(step, measures)) is not None]
    if not tables:
        return dict.fromkeys(measures, _UNKNOWN)
    return dict(zip(measures, _pool(np.concatenate(tables)), strict=True))


def pool_over_steps(means: Float64, tokens: Float64) -> PooledMean:
    """Return the pooled mean from each step's mean [S] and tokens [S]; clusters are steps, so the interval is wide."""
    known = np.isfinite(means) & (tokens > 0)
    if not known.any():
        return _UNKNOWN
    return _pool(np.stack([means[known] * tokens[known], tokens[known]], axis=1))[0]


def _sums_of_prompts(step: RolloutSummaries, measures: Sequence[str]) -> Float64 | None:
    """Return the sums of `measures` and the tokens of each prompt of a step, [G, K + 1]; None without tokens."""
    clusters, columns = step.clusters(), [step.column(CLUSTERED_BY_PROMPT[name]) for name in measures]
    order = np.lexsort((step.ranks("sample_id"), clusters))
    _, inverse = np.unique(clusters[order], return_inverse=True)
    if inverse.size == 0:
        return None
    values = [column[order].astype(np.float64) for column in (*columns, step.column("n_tokens"))]
    table: Float64 = np.stack([np.bincount(inverse, weights=value) for value in values], axis=1).astype(np.float64)
    return table[table[:, -1] > 0]


def _pool(table: Float64) -> list[PooledMean]:
    """Return K pooled means from a table [G, K + 1] of the sums of G clusters; the last column counts tokens."""
    sums, tokens = table[:, :-1], table[:, -1]
    intervals = nonnegative_intervals(sums, tokens, resamples=MORE_RESAMPLES)
    return [
        PooledMean(
            found.mean, found.low, found.high, found.clusters,
            effective_number(float(column.sum()), float(np.square(column).sum())),
        )
        for found, column in zip(intervals, sums.T, strict=True)
    ]  # fmt: skip
