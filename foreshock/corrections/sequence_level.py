"""Sequence corrections, exact at any threshold, from one row of summaries per rollout.

A row counts with its measured tokens; ρ_seq = exp(Σ d) over them, infinite on overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshock.corrections.catalogue import Correction
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.results import Evaluation, WeightMoments
from foreshock.corrections.sequences import Booleans, Float64, Sequences, undersampling_notes
from foreshock.corrections.sums import mean
from foreshock.corrections.thresholds import Threshold
from foreshock.measures.statistics.log_weights import LogWeights

__all__ = ["evaluate_sequences"]

_WITH_RATIO = frozenset({"sequence_is", "sequence_tis", "sequence_mis"})


def evaluate_sequences(
    correction: Correction, threshold: Threshold, sequences: Sequences, exact_kl: ExactKl | None
) -> Evaluation:
    """Return the effect of a sequence correction; there must be at least one sequence."""
    if correction.name.startswith("trm_") and exact_kl is None:
        return Evaluation(
            correction,
            threshold,
            threshold,
            not_estimable="the mask needs the exact KL of each token over the whole vocabulary, which log-probs of "
            "sampled tokens do not give; pass it to the library's Evaluator as exact_kl",
        )
    touched = _beyond(correction.name, threshold, sequences, exact_kl)
    dropped = touched if correction.effect == "dropped" else np.zeros_like(touched)
    weights = _Weights(sequences, correction, threshold, touched, dropped)
    tokens = sequences.tokens
    return Evaluation(
        correction,
        threshold,
        threshold,
        kept_tokens=float(tokens[~dropped].sum() / sequences.total_tokens),
        kept_sequences=float((~dropped).sum() / dropped.size),
        touched_tokens=float(tokens[touched].sum() / sequences.total_tokens),
        weights=weights.moments(),
        distortion=mean(np.abs(weights.differences())),
        uncorrected_distortion=mean(np.abs(sequences.ratios_minus_one)),
        token_distortion=weights.token_distortion(),
        advantage_distortion=weights.advantage_distortion(),
        affected=sequences.affected(touched),
        notes=undersampling_notes(sequences.columns["sum_k3"]),
    )


def _beyond(name: str, threshold: Threshold, sequences: Sequences, exact_kl: ExactKl | None) -> Booleans:
    """Return True for the sequences beyond the threshold, shape [M]."""
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
    dropped: Booleans

    @property
    def _has_ratio(self) -> bool:
        return self.correction.name in _WITH_RATIO

    def log_weights(self) -> Float64:
        """Return log w, shape [M]; −inf if w is 0."""
        values = self.sequences.log_weights if self._has_ratio else np.zeros_like(self.sequences.log_weights)
        if self.correction.effect == "truncated":
            values = np.minimum(values, self.threshold.log_upper)
        return np.where(self.dropped, -math.inf, values)

    def differences(self) -> Float64:
        """Return w − ρ_seq, shape [M]; exactly 0 for an unchanged ρ_seq."""
        ratios = self.sequences.ratios_minus_one
        if not self._has_ratio:
            kept = -ratios
        elif self.correction.effect == "truncated":
            cap = math.inf if self.threshold.upper is None else self.threshold.upper
            kept = np.where(self.touched, cap - 1.0 - ratios, 0.0)
        else:
            kept = np.zeros_like(ratios)
        return np.where(self.dropped, -1.0 - ratios, kept)

    def moments(self) -> WeightMoments:
        """Return mean, variance and effective fraction of w."""
        logs = self.log_weights()
        with np.errstate(over="ignore"):
            weights = np.exp(logs)
        average = mean(weights)
        variance = math.inf
        if math.isfinite(average):
            with np.errstate(over="ignore"):
                variance = mean(np.square(weights - average))
        kept = logs[~self.dropped]
        share = kept.size / logs.size
        # (Σw)²/(N Σw²) in log space, which is finite even if w overflows.
        return WeightMoments(average, variance, LogWeights.of(kept).effective_fraction() * share)

    def token_distortion(self) -> float:
        """Return E|w − ρ_t| over tokens, of a mask; NaN if the weight is that of a whole sequence."""
        if self._has_ratio:
            return math.nan
        above = self.sequences.columns["sum_ratio_minus_one"]
        # |1 − ρ| = (ρ − 1) + 2 (1 − ρ)⁺
        kept = above + 2.0 * self.sequences.columns["sum_tv"]
        values = np.where(self.dropped, above + self.sequences.tokens, kept)
        return mean(values) * values.size / self.sequences.total_tokens

    def advantage_distortion(self) -> float:
        """Return E[(w − ρ_seq)·A] over the sequences with an advantage; NaN if there are none."""
        advantage = self.sequences.columns["advantage"]
        known = np.isfinite(advantage)
        differences = self.differences()
        # An infinite ρ_seq times an advantage of 0 would be NaN.
        products = np.multiply(differences, advantage, where=known & (advantage != 0.0), out=np.zeros_like(differences))
        return mean(products[known])
