"""The mergeable statistics of one comparison, from which all its measures and tables are computed.

A step's statistics are the fold of its shards' in sorted order. Integers are exact; any split and order of the rollouts
gives the same float64 sums to their rounding, about 1e-15 of the sum of absolute values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from foreshock.measures.estimators.comparison_measures import comparison_measures
from foreshock.measures.inputs import token_inputs
from foreshock.measures.passes import sum_rollouts
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.statistics.comparison_sums import COUNTS, ComparisonSums
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS, RolloutSums, probability_moments, sequence_sums

_CLUSTER_PLACES = np.array([TOKEN_SUMS.index(name) for name in CLUSTER_COLUMNS])


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonStatistics(ComparisonSums):
    """Statistics of d = log target − log behaviour (π/μ) over the model-generated tokens of some rollouts.

    Tokens with a NaN or ±inf log-prob on either side are counted and otherwise excluded; a sequence with such a token
    is counted too, and excluded from the sequence measures. Build them with `of`.
    """

    statistics_version: ClassVar[int] = blob.STATISTICS_VERSION

    @classmethod
    def of(
        cls,
        target: ArrayLike,
        behaviour: ArrayLike,
        offsets: ArrayLike,
        mask: ArrayLike | None = None,
        group_ids: Iterable[object] | None = None,
        *,
        entropy: ArrayLike | None = None,
        turn: ArrayLike | None = None,
        lag: ArrayLike | None = None,
        token_ids: ArrayLike | None = None,
        advantage: ArrayLike | None = None,
    ) -> ComparisonStatistics:
        """Return the statistics of log π `target` and log μ `behaviour`, [T] each; `offsets` [N + 1] cut N rollouts.

        `mask` [T] is 0 for tokens that the model did not sample; `group_ids` [N] name the prompts by strings or
        integers (None: a cluster by itself); `entropy` [T] is that of μ in nats; `turn` [T] numbers the turns; `lag`
        [T] is in weights versions; `advantage` is [T] or [N]. Raises InvalidRolloutsError if sizes or types do not fit.
        """
        inputs = token_inputs(
            target, behaviour, offsets, mask,
            entropy=entropy, turn=turn, lag=lag, token_ids=token_ids, advantage=advantage,
        )  # fmt: skip
        return cls.from_rollout_sums(sum_rollouts(inputs), group_ids)

    @classmethod
    def from_rollout_sums(cls, rollouts: RolloutSums, group_ids: Iterable[object] | None) -> ComparisonStatistics:
        """Return the statistics of rollouts from the sums of a pass; `group_ids` [N] name their prompts."""
        measured, whole = rollouts.tokens > 0, rollouts.whole()
        log_weights = rollouts.column("d")[whole]
        counts = {
            "rollouts": measured.size,
            "whole_rollouts": int(whole.sum()),
            "incomplete_rollouts": int((rollouts.tokens < rollouts.generated).sum()),
            "generated_tokens": int(rollouts.generated.sum()),
            "tokens": int(rollouts.tokens.sum()),
            "nonfinite_target": rollouts.nonfinite_target,
            "nonfinite_behaviour": rollouts.nonfinite_behaviour,
            "zero_tokens": rollouts.zero_tokens,
            "entropy_tokens": int(rollouts.entropy_tokens.sum()),
            "advantage_tokens": int(rollouts.advantage_tokens.sum()),
            "bad_updates": rollouts.bad_updates,
            "turns": rollouts.turn_weights.count,
        }
        extremes = [-math.inf, -math.inf, rollouts.max_probability_difference, -math.inf, -math.inf]
        if measured.any():
            extremes[:2] = -rollouts.min_d[measured].min(), rollouts.max_d[measured].max()
        if log_weights.size:
            mean_d = log_weights / rollouts.tokens[whole]
            extremes[3:] = -mean_d.min(), mean_d.max()
        probabilities, difference = probability_moments(rollouts)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.concatenate([rollouts.sums.sum(axis=0), sequence_sums(rollouts, whole).sum(axis=0)])
        return cls(
            counts=np.array([counts[name] for name in COUNTS], dtype=np.int64),
            sums=sums,
            extremes=np.array(extremes),
            token_weights=rollouts.token_weights,
            turn_weights=rollouts.turn_weights,
            sequence_weights=LogWeights.of(log_weights),
            histogram=rollouts.histogram,
            region_tokens=rollouts.region_tokens,
            region_sums=rollouts.region_sums,
            probabilities=probabilities,
            difference=difference,
            conditions=rollouts.conditions,
            token_ids=rollouts.token_ids,
            largest_d=rollouts.largest_d,
            largest_minus_d=rollouts.largest_minus_d,
            clusters=ClusterSums.of(rollouts.tokens, rollouts.sums[:, _CLUSTER_PLACES], group_ids),
        )

    def measures(self) -> dict[str, float]:
        """Return all comparison and sequence measures of the registry by column; NaN if not estimable.

        Measures that need one row per rollout (`RolloutSummaries.bootstrap_measures`) are NaN here.
        """
        return comparison_measures(self)
