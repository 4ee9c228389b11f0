"""Sequence corrections, exactly and at any threshold, from one row a rollout.

A row takes part with the tokens that were measured; ρ_seq = exp(Σ d) over them. What lies beyond float64 is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshock.corrections.affected import casualties_of
from foreshock.corrections.catalogue import Correction
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.results import Evaluation, WeightMoments
from foreshock.corrections.sequences import Booleans, Float64, Sequences, mean
from foreshock.corrections.thresholds import Threshold
from foreshock.corrections.undersampling import unseen_weight
from foreshock.measures.statistics.log_weights import LogWeights

__all__ = ["evaluate_sequences"]

_WITH_RATIO = frozenset({"sequence_is", "sequence_tis", "sequence_mis"})


def evaluate_sequences(
    correction: Correction, threshold: Threshold, sequences: Sequences, exact_kl: ExactKl | None
) -> Evaluation:
    """What a sequence correction would do to these sequences, of which there is at least one."""
    if correction.name.startswith("trm_") and exact_kl is None:
        return Evaluation(
            correction,
            threshold,
            threshold,
            not_estimable="this masks by the exact KL of each token, over the whole vocabulary: log-probs of sampled "
            "tokens cannot give it; the Evaluator of the library takes it as exact_kl",
        )
    touched = _beyond(correction.name, threshold, sequences, exact_kl)
    lost = touched if correction.effect == "lost" else np.zeros_like(touched)
    weights = _Weights(sequences, correction, threshold, touched, lost)
    tokens = sequences.tokens
    return Evaluation(
        correction,
        threshold,
        threshold,
        kept_tokens=float(tokens[~lost].sum() / sequences.total_tokens),
        kept_sequences=float((~lost).sum() / lost.size),
        touched_tokens=float(tokens[touched].sum() / sequences.total_tokens),
        weights=weights.moments(),
        distortion=mean(np.abs(weights.differences())),
        uncorrected_distortion=mean(np.abs(sequences.ratios_minus_one)),
        token_distortion=weights.token_distortion(),
        advantage_distortion=weights.advantage_distortion(),
        casualties=casualties_of(sequences, touched),
        notes=unseen_weight(sequences.columns["sum_k3"]),
    )


def _beyond(name: str, threshold: Threshold, sequences: Sequences, exact_kl: ExactKl | None) -> Booleans:
    """[M] which sequences lie beyond the threshold."""
    upper = math.inf if threshold.upper is None else threshold.upper
    if exact_kl is not None and name.startswith("trm_"):
        return exact_kl.of_kind(name.removeprefix("trm_"))[sequences.measured] > upper
    if name == "veto":
        return sequences.columns["min_d"] < threshold.log_lower
    of_k3 = {
        "k3_rs_mean": sequences.mean_k3,
        "k3_rs_sum": sequences.columns["sum_k3"],
        "k3_rs_max": sequences.largest_k3,
    }
    if name in of_k3:
        return of_k3[name] > upper
    log_ratios = sequences.log_weights / sequences.tokens if name == "geo_mis" else sequences.log_weights
    return (log_ratios > threshold.log_upper) | (log_ratios < threshold.log_lower)


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The weights that a sequence correction would give to M sequences."""

    sequences: Sequences
    correction: Correction
    threshold: Threshold
    touched: Booleans
    lost: Booleans

    @property
    def _has_ratio(self) -> bool:
        return self.correction.name in _WITH_RATIO

    def log_weights(self) -> Float64:
        """[M] log w; −inf where w is 0."""
        values = self.sequences.log_weights if self._has_ratio else np.zeros_like(self.sequences.log_weights)
        if self.correction.effect == "truncated":
            values = np.minimum(values, self.threshold.log_upper)
        return np.where(self.lost, -math.inf, values)

    def differences(self) -> Float64:
        """[M] w − ρ_seq; exactly 0 where the correction leaves ρ_seq as it is."""
        ratios = self.sequences.ratios_minus_one
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
        above = self.sequences.columns["sum_ratio_minus_one"]
        # |1 − ρ| = (ρ − 1) + 2 (1 − ρ)⁺
        kept = above + 2.0 * self.sequences.columns["sum_tv"]
        values = np.where(self.lost, above + self.sequences.tokens, kept)
        return mean(values) * values.size / self.sequences.total_tokens

    def advantage_distortion(self) -> float:
        """E[(w − ρ_seq)·A] over the sequences that have an advantage; NaN where none has."""
        advantage = self.sequences.columns["advantage"]
        known = np.isfinite(advantage)
        differences = self.differences()
        # An infinite ρ_seq must not meet an advantage of 0.
        products = np.multiply(differences, advantage, where=known & (advantage != 0.0), out=np.zeros_like(differences))
        return mean(products[known])
