"""The mergeable statistics of a step's rollouts: lengths, truncation, rewards, entropy, lag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import lag_of_tokens, truncated_rollouts, turns_of_rollouts
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.compensated_sums import CompensatedSums, two_product
from foreshock.measures.statistics.histograms import LENGTH_GRID, LengthStatistics
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

COUNTS = (
    "tool_tokens",
    "prompt_tokens",
    "truncated",
    "truncation_known",
    "turns",
    "turns_known",
    "rewards",
    "entropies",
    "rollout_log_probs",
    "trainer_log_probs",
    "lags",
    "lag_sum",
    "nonfinite_rollout_log_probs",
    "nonfinite_trainer_log_probs",
)
SUMS = ("reward", "reward_squared", "entropy", "rollout_log_prob", "trainer_log_prob")
# Merged by maximum; −inf means that there is no value yet.
EXTREMES = ("minus_min_reward", "max_reward", "max_lag")

_LENGTH_QUANTILES = {f"response_length_p{percent}": percent / 100 for percent in (50, 90, 99)}
_KIND = "step"
_LAYOUT: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "counts": ("<i8", (len(COUNTS),)),
    "sums": ("<f8", (2, len(SUMS))),
    "extremes": ("<f8", (len(EXTREMES),)),
    "length_moments": ("<i8", (5,)),
    "length_histogram": ("<i8", (LENGTH_GRID.size,)),
}


@dataclass(frozen=True, slots=True, eq=False)
class StepStatistics:
    """Statistics of some rollouts of one step. Build them with `of`."""

    statistics_version: ClassVar[int] = blob.STATISTICS_VERSION

    counts: NDArray[np.int64]
    sums: CompensatedSums
    extremes: NDArray[np.float64]
    lengths: LengthStatistics

    @classmethod
    def of(cls, batch: RolloutBatch) -> StepStatistics:
        """Return the statistics of a batch's rollouts."""
        counts = dict.fromkeys(COUNTS, 0)
        sums = dict.fromkeys(SUMS, (0.0, 0.0))
        extremes = dict.fromkeys(EXTREMES, -math.inf)
        lengths = batch.generated_lengths
        tokens = int(lengths.sum())
        truncated, known = truncated_rollouts(batch)
        counts["tool_tokens"], counts["prompt_tokens"] = batch.num_tokens - tokens, int(batch.prompt_offsets[-1])
        counts["truncated"], counts["truncation_known"] = int(truncated.sum()), int(known.sum())
        if batch.turn is not None:
            counts["turns"], counts["turns_known"] = int(turns_of_rollouts(batch).sum()), batch.num_rollouts
        if batch.reward is not None:
            rewards = batch.reward[np.isfinite(batch.reward)].astype(np.float64)
            counts["rewards"] = rewards.size
            square, lost = two_product(rewards, rewards)
            both, errors = np.stack([rewards, square], axis=1), np.stack([np.zeros_like(lost), lost], axis=1)
            sums |= zip(("reward", "reward_squared"), _pairs(both, errors), strict=True)
            if rewards.size:
                extremes["minus_min_reward"], extremes["max_reward"] = -float(rewards.min()), float(rewards.max())
        of_rollouts = {}
        for name, plural, values in (
            ("entropy", "entropies", batch.entropy),
            ("rollout_log_prob", "rollout_log_probs", batch.rollout_log_probs),
            ("trainer_log_prob", "trainer_log_probs", batch.trainer_log_probs),
        ):
            if values is None:
                continue
            finite = np.isfinite(values) if name == "entropy" else are_log_probs(values)
            if batch.response_mask is not None:
                finite &= batch.generated
            counts[plural] = found = int(np.count_nonzero(finite))
            if name != "entropy":
                counts[f"nonfinite_{plural}"] = tokens - found
            # Summing each rollout first makes the result independent of the split into shards.
            values = values if found == values.size else np.where(finite, values, 0.0)
            of_rollouts[name] = row_sums(values, batch.response_offsets)
        if of_rollouts:
            columns = np.array(list(of_rollouts.values())).T.copy()
            sums |= zip(of_rollouts, _pairs(columns, np.zeros_like(columns)), strict=True)
        lag = lag_of_tokens(batch)
        if lag is not None and (lag := lag[batch.generated]).size:
            counts["lags"], counts["lag_sum"], extremes["max_lag"] = lag.size, int(lag.sum()), float(lag.max())
        return cls(
            np.array([counts[name] for name in COUNTS], dtype=np.int64),
            CompensatedSums.from_array(np.array([sums[name] for name in SUMS]).T),
            np.array([extremes[name] for name in EXTREMES]),
            LengthStatistics.of(lengths),
        )

    def merge(self, other: StepStatistics) -> StepStatistics:
        """Return the statistics over the rollouts of both."""
        return StepStatistics(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.extremes, other.extremes),
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
        sums = dict(zip(SUMS, self.sums.value.tolist(), strict=True))
        minus_lowest, highest, max_lag = (value if value > -math.inf else math.nan for value in self.extremes.tolist())
        lengths = self.lengths
        return {
            "num_rollouts": self.rollouts,
            "num_tokens": self.tokens,
            "num_tool_tokens": counts["tool_tokens"],
            "response_length_mean": lengths.mean(),
            "response_length_std": lengths.standard_deviation(),
            **dict(zip(_LENGTH_QUANTILES, lengths.quantiles(tuple(_LENGTH_QUANTILES.values())), strict=True)),
            "response_length_min": lengths.minimum(),
            "response_length_max": lengths.maximum(),
            # A prompt has at least one token: without any, prompts were not logged.
            "prompt_length_mean": counts["prompt_tokens"] / self.rollouts if counts["prompt_tokens"] else math.nan,
            "truncated_fraction": _ratio(counts["truncated"], counts["truncation_known"]),
            "turns_mean": _ratio(counts["turns"], counts["turns_known"]),
            "reward_mean": _ratio(sums["reward"], counts["rewards"]),
            "reward_std": self._reward_deviation(counts["rewards"]),
            "reward_min": -minus_lowest,
            "reward_max": highest,
            "entropy_mean": _ratio(sums["entropy"], counts["entropies"]),
            "rollout_log_prob_mean": _ratio(sums["rollout_log_prob"], counts["rollout_log_probs"]),
            "trainer_log_prob_mean": _ratio(sums["trainer_log_prob"], counts["trainer_log_probs"]),
            "lag_mean": _ratio(counts["lag_sum"], counts["lags"]),
            "lag_max": max_lag,
            "nonfinite_log_probs": counts["nonfinite_rollout_log_probs"] + counts["nonfinite_trainer_log_probs"],
        }

    def _reward_deviation(self, count: int) -> float:
        if count < 2:
            return math.nan
        # Integers: their quotient is rounded once, as with Fractions.
        total, of_total = self.sums.exact_ratio(SUMS.index("reward"))
        square, of_square = self.sums.exact_ratio(SUMS.index("reward_squared"))
        difference = square * of_total * of_total * count - total * total * of_square
        return math.sqrt(max(difference / (of_square * of_total * of_total * count * (count - 1)), 0.0))

    def to_bytes(self) -> bytes:
        """Return the statistics as a blob for `from_bytes`: a JSON header and raw arrays."""
        return blob.pack(
            _KIND,
            {
                "counts": self.counts,
                "sums": self.sums.to_array(),
                "extremes": self.extremes,
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
            CompensatedSums.from_array(arrays["sums"]),
            arrays["extremes"],
            LengthStatistics(arrays["length_moments"], arrays["length_histogram"]),
        )


def _pairs(values: NDArray[np.float64], errors: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return the compensated sum (high, low) of each column of `values` [N, K] with these rounding errors [N, K]."""
    sums = CompensatedSums.over_first_axis(values, errors)
    return list(zip(sums.high.tolist(), sums.low.tolist(), strict=True))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
