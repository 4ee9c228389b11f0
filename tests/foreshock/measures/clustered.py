"""Student's t intervals of token means from a row per rollout: what those of mergeable sums must equal."""

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators.intervals import Interval, interval_from_residuals, sums_of_clusters
from foreshock.measures.rollout_summaries import RolloutSummaries


def clustered_interval(
    sums: NDArray[np.float64], tokens: NDArray[np.int64], clusters: NDArray[np.int64] | None = None
) -> Interval:
    """Return the interval of Σ sums / Σ tokens, both [N], one per rollout; `clusters` [N] is each rollout's cluster.

    Without `clusters` each rollout is its own cluster. Rollouts without tokens are excluded.
    """
    of_clusters, sizes = sums_of_clusters(sums[:, None], tokens, clusters)
    if sizes.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = float(of_clusters.sum() / sizes.sum())
        residuals = of_clusters[:, 0] - mean * sizes
        square = float(np.square(residuals).sum())
    return interval_from_residuals(mean, square, int(sizes.sum()), int(sizes.size))


def k3_interval(rollouts: RolloutSummaries) -> Interval:
    """Return the nominal 95 % interval of the token mean of k3, clustered by prompt group, or by rollout."""
    sums, tokens = rollouts.column("sum_k3"), rollouts.column("n_tokens")
    return clustered_interval(sums, tokens, rollouts.clusters()).never_negative()
