"""Measures of exact divergences: token means with intervals, for one pair of scorers at one step.

The divergence at a visited state is a sum over the vocabulary, without the sampling noise of the token. The states were
sampled, so its mean still varies with the prompts and rollouts of the step; the intervals show that variation. k3 of
the same scores at the same tokens is included for comparison: its interval has both kinds of noise.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.records import from_attributes
from foreshock.api.replays import ExactMeasures, MeanRecord
from foreshock.measures.estimators.bootstrap import effective_number, nonnegative_intervals
from foreshock.measures.estimators.intervals import sums_of_clusters
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.inputs import generated_tokens, group_names
from foreshock.measures.statistics.clusters import clusters_of
from foreshock.rollouts.arrays import row_counts, row_sums

Float64 = NDArray[np.float64]

_MEANS = ("kl", "reverse_kl", "tv", "top1_flip", "target_entropy", "behaviour_entropy", "k3_kl")


def measure_exact(
    values: Mapping[str, NDArray[Any]],
    offsets: NDArray[np.int64],
    mask: ArrayLike | None = None,
    group_ids: Iterable[object] | None = None,
) -> ExactMeasures:
    """Return the measures of the divergences at the states before T response tokens, which `offsets` [N + 1] cut.

    `values` has by name, each [T]: KL(μ‖π) `kl` and KL(π‖μ) `reverse_kl` in nats, the total variation `tv`, `top1_flip`
    (1 if the likeliest tokens differ), `target_entropy` H(π) and `behaviour_entropy` H(μ) in nats, and the log-probs
    `target_log_probs` and `behaviour_log_probs` of the response token; NaN at a state without a distribution.

    `mask` [T] is 0 for tokens that the model did not sample: their states are excluded. `group_ids` [N] name the
    prompts, by which intervals are clustered; a rollout without one is its own group. Raises InvalidRolloutsError if
    sizes do not fit.
    """
    generated = generated_tokens(mask, int(offsets[-1]))
    names = group_names(group_ids, offsets.size - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = {name: value.astype(np.float64) for name, value in values.items()}
        exact["k3_kl"] = k3_kl(exact["target_log_probs"] - exact["behaviour_log_probs"])
        columns = np.stack([exact[name] for name in _MEANS], axis=1)
    finite = np.isfinite(columns).all(axis=1)
    keep = generated & finite
    sums, tokens = row_sums(np.where(keep[:, None], columns, 0.0), offsets), row_counts(keep, offsets)
    clusters = clusters_of(names)
    means = [from_attributes(MeanRecord, each) for each in nonnegative_intervals(sums, tokens, clusters)]
    of_groups, sizes = sums_of_clusters(sums[:, :1], tokens, clusters)
    return ExactMeasures(
        **dict(zip(_MEANS, means, strict=True)),
        delta_max=float(exact["tv"][keep].max()) if keep.any() else math.nan,
        tokens=int(tokens.sum()),
        rollouts=int(np.count_nonzero(tokens)),
        groups=int(sizes.size),
        effective_groups=effective_number(float(of_groups.sum()), float(np.square(of_groups).sum())),
        non_finite=int(np.count_nonzero(generated & ~finite)),
    )
