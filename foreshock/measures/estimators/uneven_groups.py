"""Few or uneven prompt groups: the effective number of groups, and an upper end that covers what a few groups hide.

If prompts differ in scale, a batch of few groups often lacks the large ones. Its mean is then too low, and so is any
error computed from the deviations of its groups, resampled or not: with 8 groups whose |d| has a log-standard deviation
of 0.8, the bootstrap-t covers about 80 %. The spread of the *logarithms* of the group means still shows that larger
groups exist. For log-normal group means with the log-variance s², the log of the mean has the error
√(s²/G + s⁴/(2(G − 1))) (Cox's method). `high_from_spread` uses this error around the sample mean, so that the end
converges to the mean for any distribution of the groups.

Sources: Zhou and Gao, "Confidence intervals for the log-normal mean" (1997), for Cox's method; Carter, Schnepel and
Steigerwald, "Asymptotic behavior of a t-test robust to cluster heterogeneity" (2017), and Kish (1965), for effective
numbers of clusters.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.estimators.intervals import student_t_quantile

Float64 = NDArray[np.float64]

# A group mean below this fraction of the mean counts as this fraction: only the spread of the large groups matters, and
# a group without any mismatch has no logarithm.
_LEAST_GROUP_MEAN = 0.01


def effective_number(total: float, square_sum: float) -> float:
    """Return (Σ S_g)²/Σ S_g² from `total` = Σ S_g and `square_sum` = Σ S_g², S_g ≥ 0 the sums of G groups.

    G if all groups contribute the same, 1 if one contributes everything; NaN if no group contributes anything or a sum
    is not finite.
    """
    if not 0.0 < square_sum < math.inf or not 0.0 < total < math.inf:
        return math.nan
    root = total / math.sqrt(square_sum)
    return root * root


def high_from_spread(sums: Float64, tokens: Float64) -> Float64:
    """Return the upper 97.5 % ends of Σ sums / Σ tokens, [K], from the sums [G, K] ≥ 0 and the tokens [G] of G groups.

    The error of the logarithm is the larger of the clustered relative error and Cox's, with G replaced by (Σ T)²/Σ T²
    if groups differ in their numbers of tokens; the quantile is Student's with G − 1 degrees of freedom. NaN below two
    groups and if the mean is 0 or not finite.
    """
    groups = int(tokens.size)
    if groups < 2:
        return np.full(sums.shape[1], math.nan)
    with np.errstate(all="ignore"):
        total = tokens.sum()
        means = sums.sum(axis=0) / total
        squares = np.square(sums / means - tokens[:, None]).sum(axis=0)
        clustered = squares * groups / (groups - 1) / total**2
        logs = np.log(np.maximum(sums / tokens[:, None] / means, _LEAST_GROUP_MEAN))
        spread = logs.var(axis=0, ddof=1)
        count = total**2 / np.square(tokens).sum()
        of_spread = spread / count + np.square(spread) / (2.0 * max(count - 1.0, 1.0))
        error = np.sqrt(np.maximum(clustered, of_spread))
        high: Float64 = means * np.exp(student_t_quantile(0.975, groups - 1) * error)
    return np.where(np.isfinite(high) & (means > 0.0), high, math.nan)
