"""The mergeable statistics of a step's rollouts: lengths, truncation, rewards, entropy, lag."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
        totals = _Totals(batch)
        totals.add_rollouts(batch)
        if batch.reward is not None:
            totals.add_rewards(batch.reward)
        for name, values in (
            ("entropy", batch.entropy),
            ("rollout_log_prob", batch.rollout_log_probs),
            ("trainer_log_prob", batch.trainer_log_probs),
        ):
            if values is not None:
                totals.add_tokens(name, batch, values)
        totals.add_up()
        lag = lag_of_tokens(batch)
        if lag is not None:
            totals.add_lag(lag[batch.generated])
        high, low = zip(*(totals.sums[name] for name in SUMS), strict=True)
        return cls(
            np.array([totals.counts[name] for name in COUNTS], dtype=np.int64),
            CompensatedSums(np.array(high), np.array(low)),
            np.array([totals.extremes[name] for name in EXTREMES]),
            LengthStatistics.of(totals.generated_lengths),
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
        """Return how many rollouts were truncated, and of how many that is known."""
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
        # Whole numbers, whose quotient is rounded once as that of Fractions would be.
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
        """Return the statistics of `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        arrays = blob.unpack(_KIND, data, _LAYOUT)
        return cls(
            arrays["counts"],
            CompensatedSums.from_array(arrays["sums"]),
            arrays["extremes"],
            LengthStatistics(arrays["length_moments"], arrays["length_histogram"]),
        )


class _Totals:
    """COUNTS, SUMS as (high, low), and EXTREMES by name, while one batch is added up."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.generated_lengths = batch.generated_lengths
        self._tokens = int(self.generated_lengths.sum())
        self.counts = dict.fromkeys(COUNTS, 0)
        self.sums = dict.fromkeys(SUMS, (0.0, 0.0))
        self.extremes = dict.fromkeys(EXTREMES, -math.inf)
        self._of_rollouts: dict[str, NDArray[np.float64]] = {}

    def add_rollouts(self, batch: RolloutBatch) -> None:
        truncated, known = truncated_rollouts(batch)
        self.counts["tool_tokens"] = batch.num_tokens - self._tokens
        self.counts["prompt_tokens"] = int(batch.prompt_offsets[-1])
        self.counts["truncated"], self.counts["truncation_known"] = int(truncated.sum()), int(known.sum())
        if batch.turn is not None:
            self.counts["turns"], self.counts["turns_known"] = int(turns_of_rollouts(batch).sum()), batch.num_rollouts

    def add_rewards(self, reward: NDArray[np.float32]) -> None:
        rewards = reward[np.isfinite(reward)].astype(np.float64)
        square, lost = two_product(rewards, rewards)
        self.counts["rewards"] = rewards.size
        both, errors = np.empty((rewards.size, 2)), np.zeros((rewards.size, 2))
        both[:, 0], both[:, 1], errors[:, 1] = rewards, square, lost
        self._sum_columns(("reward", "reward_squared"), both, errors)
        if rewards.size:
            self.extremes["minus_min_reward"] = -float(rewards.min())
            self.extremes["max_reward"] = float(rewards.max())

    def add_tokens(self, name: str, batch: RolloutBatch, values: NDArray[np.float32]) -> None:
        """Add the finite values of generated tokens; of log-probs, also count those that are none (`are_log_probs`)."""
        finite = np.isfinite(values) if name == "entropy" else are_log_probs(values)
        if batch.response_mask is not None:
            finite &= batch.generated
        plural = "entropies" if name == "entropy" else f"{name}s"
        self.counts[plural] = found = int(np.count_nonzero(finite))
        if name != "entropy":
            self.counts[f"nonfinite_{plural}"] = self._tokens - found
        # Summing each rollout first makes the result independent of the split into shards.
        self._of_rollouts[name] = row_sums(
            values if found == values.size else np.where(finite, values, 0.0), batch.response_offsets
        )

    def add_up(self) -> None:
        """Sum what was added of tokens over the rollouts, all columns at once."""
        if self._of_rollouts:
            columns = np.array(list(self._of_rollouts.values())).T.copy()
            self._sum_columns(self._of_rollouts, columns, np.zeros_like(columns))

    def _sum_columns(self, names: Iterable[str], values: NDArray[np.float64], errors: NDArray[np.float64]) -> None:
        sums = CompensatedSums.over_first_axis(values, errors)
        self.sums.update(zip(names, zip(sums.high.tolist(), sums.low.tolist(), strict=True), strict=True))

    def add_lag(self, lag: NDArray[np.integer]) -> None:
        if lag.size:
            self.counts["lags"], self.counts["lag_sum"] = lag.size, int(lag.sum())
            self.extremes["max_lag"] = float(lag.max())


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
