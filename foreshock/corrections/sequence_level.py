"""Sequence corrections, exactly and at any threshold, from one row a rollout.

A row takes part with the tokens that were measured; ρ_seq = exp(Σ d) over them. What lies beyond float64 is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.casualties import casualties_of
from foreshock.corrections.catalogue import Correction
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.exact_sums import mean
from foreshock.corrections.results import Evaluation, WeightMoments
from foreshock.corrections.thresholds import Threshold
from foreshock.corrections.unseen import unseen_weight
from foreshock.measures.log_weights import LogWeights
from foreshock.measures.summaries import RolloutSummaries
from foreshock.measures.token import k3_kl

__all__ = ["evaluate_sequences"]

Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]

_WITH_RATIO = frozenset({"sequence_is", "sequence_tis", "sequence_mis"})


def evaluate_sequences(
    correction: Correction, threshold: Threshold, summaries: RolloutSummaries, exact_kl: ExactKl | None
) -> Evaluation:
    """What a sequence correction would do to the rollouts of `summaries`, at least one of them with a token."""
    if correction.name.startswith("trm_") and exact_kl is None:
        return Evaluation(
            correction,
            threshold,
            threshold,
            not_estimable="this masks by the exact KL of each token, over the whole vocabulary: "
            "log-probs of sampled tokens cannot give it",
        )
    rows = _Rows.of(summaries)
    beyond = np.zeros(summaries.num_rollouts, dtype=np.bool_)
    beyond[rows.measured] = _beyond(correction.name, threshold, rows, exact_kl)
    touched = beyond[rows.measured]
    lost = touched if correction.effect == "lost" else np.zeros_like(touched)
    weights = _Weights(rows, correction, threshold, touched, lost)
    tokens = rows.tokens.sum()
    return Evaluation(
        correction,
        threshold,
        threshold,
        kept_tokens=float(rows.tokens[~lost].sum() / tokens),
        kept_sequences=float((~lost).sum() / lost.size),
        touched_tokens=float(rows.tokens[touched].sum() / tokens),
        weights=weights.moments(),
        distortion=mean(np.abs(weights.differences())),
        uncorrected_distortion=mean(np.abs(rows.ratios_minus_one)),
        token_distortion=weights.token_distortion(),
        advantage_distortion=weights.advantage_distortion(),
        casualties=casualties_of(summaries, beyond, rows.measured),
        notes=unseen_weight(rows.sum_k3),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rollouts with measured tokens: [M] arrays; `measured` [N] says which of all they are."""

    measured: Booleans
    tokens: Float64
    log_weights: Float64
    ratios_minus_one: Float64
    min_d: Float64
    max_d: Float64
    sum_k3: Float64
    sum_ratio_minus_one: Float64
    sum_tv: Float64
    advantage: Float64

    @classmethod
    def of(cls, summaries: RolloutSummaries) -> _Rows:
        measured = summaries.column("n_tokens") > 0
        columns = {
            name: summaries.column(name).astype(np.float64)[measured]
            for name in ("n_tokens", "sum_d", "min_d", "max_d", "sum_k3", "sum_ratio_minus_one", "sum_tv", "advantage")
        }
        tokens = columns["n_tokens"]
        with np.errstate(over="ignore"):
            ratios = np.expm1(columns["sum_d"])
        return cls(
            measured,
            tokens,
            columns["sum_d"],
            ratios,
            columns["min_d"],
            columns["max_d"],
            columns["sum_k3"],
            columns["sum_ratio_minus_one"],
            columns["sum_tv"],
            columns["advantage"],
        )


def _beyond(name: str, threshold: Threshold, rows: _Rows, exact_kl: ExactKl | None) -> Booleans:
    """[M] which sequences lie beyond the threshold."""
    upper = math.inf if threshold.upper is None else threshold.upper
    if exact_kl is not None and name.startswith("trm_"):
        return exact_kl.of_kind(name.removeprefix("trm_"))[rows.measured] > upper
    if name == "veto":
        return rows.min_d < threshold.log_lower
    if name == "k3_rs_mean":
        return rows.sum_k3 / rows.tokens > upper
    if name == "k3_rs_sum":
        return rows.sum_k3 > upper
    if name == "k3_rs_max":
        # k3 is convex with its minimum at d = 0: it is largest at one of the ends.
        with np.errstate(over="ignore"):
            return np.maximum(k3_kl(rows.min_d), k3_kl(rows.max_d)) > upper
    log_ratios = rows.log_weights / rows.tokens if name == "geo_mis" else rows.log_weights
    return (log_ratios > threshold.log_upper) | (log_ratios < threshold.log_lower)


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The weights that a sequence correction would give to M sequences."""

    rows: _Rows
    correction: Correction
    threshold: Threshold
    touched: Booleans
    lost: Booleans

    @property
    def _has_ratio(self) -> bool:
        return self.correction.name in _WITH_RATIO

    def log_weights(self) -> Float64:
        """[M] log w; −inf where w is 0."""
        values = self.rows.log_weights if self._has_ratio else np.zeros_like(self.rows.log_weights)
        if self.correction.effect == "truncated":
            values = np.minimum(values, self.threshold.log_upper)
        return np.where(self.lost, -math.inf, values)

    def differences(self) -> Float64:
        """[M] w − ρ_seq; exactly 0 where the correction leaves ρ_seq as it is."""
        ratios = self.rows.ratios_minus_one
        if not self._has_ratio:
            kept = -ratios
        elif self.correction.effect == "truncated":
            cap = math.inf if self.threshold.upper is None else self.threshold.upper
            kept = np.where(self.touched, cap - 1.0 - ratios, 0.0)
        else:
            kept = np.zeros_like(ratios)
        return np.where(self.lost, -1.0 - ratios, kept)

    def moments(self) -> WeightMoments:
        """Mean, variance and effective fraction of w."""
        logs = self.log_weights()
        with np.errstate(over="ignore"):
            weights = np.exp(logs)
        average = mean(weights)
        variance = math.inf
        if math.isfinite(average):
            with np.errstate(over="ignore"):
                variance = mean(np.square(weights - average))
        kept = logs[~self.lost]
        share = kept.size / logs.size
        # (Σw)²/(N Σw²) in log space: it is known also where w itself is not a float64.
        return WeightMoments(average, variance, LogWeights.of(kept).effective_fraction() * share)

    def token_distortion(self) -> float:
        """E|w − ρ_t| over tokens, of a mask; NaN where the weight is that of a whole sequence."""
        if self._has_ratio:
            return math.nan
        rows = self.rows
        # |1 − ρ| = (ρ − 1) + 2 (1 − ρ)⁺
        kept = rows.sum_ratio_minus_one + 2.0 * rows.sum_tv
        values = np.where(self.lost, rows.sum_ratio_minus_one + rows.tokens, kept)
        return mean(values) * values.size / float(rows.tokens.sum())

    def advantage_distortion(self) -> float:
        """E[(w − ρ_seq)·A] over the sequences that have an advantage; NaN where none has."""
        known = np.isfinite(self.rows.advantage)
        with np.errstate(invalid="ignore"):
            return mean((self.differences() * self.rows.advantage)[known])
