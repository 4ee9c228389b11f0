"""The mergeable statistics of a step's rollouts: lengths, truncation, rewards, entropy, lag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import lag_of_tokens, truncated_rollouts, turns_of_rollouts
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.histograms import LENGTH_GRID, LengthStatistics
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

COUNTS = (
    "tool_tokens",
    "truncated",
    "truncation_known",
    "turns",
    "turns_known",
    "rewards",
    "finished_rewards",
    "entropies",
    "lags",
    "lag_sum",
    "nonfinite_rollout_log_probs",
    "nonfinite_trainer_log_probs",
)
SUMS = ("reward", "finished_reward", "entropy")

_LENGTH_QUANTILES = {f"response_length_p{percent}": percent / 100 for percent in (50, 90, 99)}
_KIND = "step"
_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (len(SUMS),)),
    "max_lag": ("<f8", (1,)),
    "length_moments": ("<i8", (4,)),
    "length_histogram": ("<i8", (LENGTH_GRID.size,)),
}


@dataclass(frozen=True, slots=True, eq=False)
class StepStatistics:
    """Statistics of some rollouts of one step. Build them with `of`."""

    statistics_version: ClassVar[int] = blob.STATISTICS_VERSION

    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    max_lag: float  # −inf if no lag is known
    lengths: LengthStatistics

    @classmethod
    def of(cls, batch: RolloutBatch) -> StepStatistics:
        """Return the statistics of a batch's rollouts."""
        counts = dict.fromkeys(COUNTS, 0)
        reward_sum = finished_sum = entropy_sum = 0.0
        max_lag = -math.inf
        lengths = batch.generated_lengths
        tokens = int(lengths.sum())
        truncated, known = truncated_rollouts(batch)
        counts["tool_tokens"] = batch.num_tokens - tokens
        counts["truncated"], counts["truncation_known"] = int(truncated.sum()), int(known.sum())
        if batch.turn is not None:
            counts["turns"], counts["turns_known"] = int(turns_of_rollouts(batch).sum()), batch.num_rollouts
        if batch.reward is not None:
            rewarded = np.isfinite(batch.reward)
            rewards, finished = (
                batch.reward[rows].astype(np.float64) for rows in (rewarded, rewarded & known & ~truncated)
            )
            counts["rewards"], reward_sum = rewards.size, float(rewards.sum())
            counts["finished_rewards"], finished_sum = finished.size, float(finished.sum())
        if batch.entropy is not None:
            finite = np.isfinite(batch.entropy) & batch.generated
            counts["entropies"] = int(np.count_nonzero(finite))
            # Summing each rollout first makes the result nearly independent of the split into shards.
            entropy_sum = float(row_sums(np.where(finite, batch.entropy, 0.0), batch.response_offsets).sum())
        for name in ("rollout_log_probs", "trainer_log_probs"):
            values = getattr(batch, name)
            if values is not None:
                counts[f"nonfinite_{name}"] = tokens - int(np.count_nonzero(are_log_probs(values) & batch.generated))
        lag = lag_of_tokens(batch)
        if lag is not None and (lag := lag[batch.generated]).size:
            counts["lags"], counts["lag_sum"], max_lag = lag.size, int(lag.sum()), float(lag.max())
        return cls(
            np.array([counts[name] for name in COUNTS], dtype=np.int64),
            np.array([reward_sum, finished_sum, entropy_sum]),
            max_lag,
            LengthStatistics.of(lengths),
        )

    def merge(self, other: StepStatistics) -> StepStatistics:
        """Return the statistics over the rollouts of both."""
        return StepStatistics(
            self.counts + other.counts,
            self.sums + other.sums,
            max(self.max_lag, other.max_lag),
            self.lengths.merge(other.lengths),
        )

    @property
    def rollouts(self) -> int:
        """The number of rollouts."""
        return self.lengths.count

    @property
    def tokens(self) -> int:
        """The number of model-generated tokens."""
        return self.lengths.total

    def truncated_and_known(self) -> tuple[int, int]:
        """Return how many rollouts were truncated, and for how many this is known."""
        truncated, known = (int(self.counts[COUNTS.index(name)]) for name in ("truncated", "truncation_known"))
        return truncated, known

    def measures(self) -> dict[str, float]:
        """Return all step measures of the registry by column; NaN if not logged."""
        counts = dict(zip(COUNTS, self.counts.tolist(), strict=True))
        reward, of_finished, entropy = self.sums.tolist()
        lengths = self.lengths
        return {
            "num_rollouts": self.rollouts,
            "num_tokens": self.tokens,
            "num_tool_tokens": counts["tool_tokens"],
            "response_length_mean": lengths.mean(),
            **dict(zip(_LENGTH_QUANTILES, lengths.quantiles(tuple(_LENGTH_QUANTILES.values())), strict=True)),
            "response_length_max": lengths.maximum(),
            "truncated_fraction": _ratio(counts["truncated"], counts["truncation_known"]),
            "turns_mean": _ratio(counts["turns"], counts["turns_known"]),
            "reward_mean": _ratio(reward, counts["rewards"]),
            "finished_reward_mean": _ratio(of_finished, counts["finished_rewards"]),
            "entropy_mean": _ratio(entropy, counts["entropies"]),
            "lag_mean": _ratio(counts["lag_sum"], counts["lags"]),
            "lag_max": self.max_lag if counts["lags"] else math.nan,
            "nonfinite_log_probs": counts["nonfinite_rollout_log_probs"] + counts["nonfinite_trainer_log_probs"],
        }

    def to_bytes(self) -> bytes:
        """Return the statistics as a blob for `from_bytes`: a JSON header and raw arrays."""
        return blob.pack(
            _KIND,
            {
                "counts": self.counts,
                "sums": self.sums,
                "max_lag": np.array([self.max_lag]),
                "length_moments": self.lengths.moments,
                "length_histogram": self.lengths.histogram,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> StepStatistics:
        """Restore the statistics from `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        return cls(
            arrays["counts"],
            arrays["sums"],
            float(arrays["max_lag"][0]),
            LengthStatistics(arrays["length_moments"], arrays["length_histogram"]),
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
