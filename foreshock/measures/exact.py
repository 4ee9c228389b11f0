"""Measures of exact divergences: token means with intervals, for one pair of scorers at one step.

The divergence at a visited state is a sum over the vocabulary, without the sampling noise of the token. The states were
sampled, so its mean still varies with the prompts and rollouts of the step; the intervals show that variation. k3 of
the same scores at the same tokens is included for comparison: its interval has both kinds of noise.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.records import from_attributes
from foreshock.api.replays import ExactMeasures, MeanRecord
from foreshock.measures.estimators.bootstrap import effective_number, nonnegative_intervals
from foreshock.measures.estimators.intervals import sums_of_clusters
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.inputs import check_size, group_names, numbers_of
from foreshock.measures.statistics.clusters import clusters_of
from foreshock.rollouts.arrays import row_counts, row_sums
from foreshock.rollouts.scores import ExactBatch

__all__ = ["ExactMeasures", "measure_exact"]

Float64 = NDArray[np.float64]

_MEANS = ("kl", "reverse_kl", "tv", "top1_flip", "target_entropy", "behaviour_entropy", "k3_kl")


def measure_exact(
    exact: ExactBatch, mask: ArrayLike | None = None, group_ids: Iterable[object] | None = None
) -> ExactMeasures:
    """Return the measures of `exact`.

    `mask` [T] is 0 for tokens that the model did not sample: their states are excluded. `group_ids` [N] name the
    prompts, by which intervals are clustered; a rollout without one is its own group. Raises InvalidRolloutsError if
    sizes do not fit.
    """
    generated = np.ones(exact.num_tokens, np.bool_) if mask is None else numbers_of("response_mask", mask) != 0
    check_size("response_mask", generated, exact.num_tokens)
    names = group_names(group_ids, exact.num_rollouts)
    with np.errstate(invalid="ignore", over="ignore"):
        d = exact.target_log_probs.astype(np.float64) - exact.behaviour_log_probs.astype(np.float64)
        known = {name: getattr(exact, name).astype(np.float64) for name in _MEANS if name != "k3_kl"}
        columns = np.stack([{**known, "k3_kl": k3_kl(d)}[name] for name in _MEANS], axis=1)
    finite = np.isfinite(columns).all(axis=1)
    keep = generated & finite
    sums, tokens = row_sums(np.where(keep[:, None], columns, 0.0), exact.offsets), row_counts(keep, exact.offsets)
    clusters = clusters_of(names)
    means = [from_attributes(MeanRecord, each) for each in nonnegative_intervals(sums, tokens, clusters)]
    of_groups, sizes = sums_of_clusters(sums[:, :1], tokens, clusters)
    return ExactMeasures(
        **dict(zip(_MEANS, means, strict=True)),
        delta_max=float(exact.tv[keep].max()) if keep.any() else math.nan,
        tokens=int(tokens.sum()),
        rollouts=int(np.count_nonzero(tokens)),
        groups=int(sizes.size),
        effective_groups=effective_number(float(of_groups.sum()), float(np.square(of_groups).sum())),
        non_finite=int(np.count_nonzero(generated & ~finite)),
    )
