"""Sequence corrections, exact at any threshold, from one row of summaries per rollout.

Only measured tokens count: ρ_seq = exp(Σ d) over them, infinite on overflow. Trust region masks also need the exact KL
of each token over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.steps import AffectedRecord, PopulationRecord
from foreshock.corrections.catalogue import NO_SEQUENCES, Correction, Evaluation, Threshold, WeightMoments
from foreshock.errors import InvalidArgumentError
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.compensated_sums import LogWeights


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, the same in any order; infinite on overflow, NaN for +inf and −inf together."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sum(terms))


def mean(values: NDArray[np.float64]) -> float:
    """Return the mean by pairwise summation; NaN of no values, infinite on overflow."""
    if not values.size:
        return float("nan")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.sum()) / values.size


@dataclass(frozen=True, slots=True, eq=False)
class ExactKl:
    """The largest and the mean exact KL(μ‖π) of the tokens of N rollouts, [N] in nats; NaN for an empty rollout."""

    largest: NDArray[np.float64]
    mean: NDArray[np.float64]

    @classmethod
    def of_tokens(cls, kl: ArrayLike, offsets: ArrayLike, generated: ArrayLike | None = None) -> ExactKl:
        """Return the KLs of N rollouts, cut at `offsets` [N + 1], from the exact KL of each token, [T] in nats.

        `generated` [T] is False for tokens that the model did not sample. A KL is infinite if π is 0 for a token that μ
        may sample; no threshold keeps such a rollout. Raises InvalidArgumentError if the sizes do not fit, or if a KL
        is NaN or negative by more than rounding.
        """
        values, cuts = np.asarray(kl, dtype=np.float64), np.asarray(offsets, dtype=np.int64)
        if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
            raise InvalidArgumentError("must start at 0, never fall, and have N + 1 entries", "offsets")
        if values.shape != (int(cuts[-1]),):
            raise InvalidArgumentError(
                f"must have the shape [{int(cuts[-1])}] of the offsets, got {list(values.shape)}", "kl"
            )
        chosen = np.ones(values.size, np.bool_) if generated is None else np.asarray(generated, dtype=np.bool_)
        if chosen.shape != values.shape:
            raise InvalidArgumentError(
                f"must have the shape {list(values.shape)} of `kl`, got {list(chosen.shape)}", "generated"
            )
        if not (values[chosen] >= -1e-6).all():
            raise InvalidArgumentError("an exact KL must be a number of at least 0", "kl")
        rows = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))[chosen]
        counts = np.bincount(rows, minlength=cuts.size - 1)
        largest = np.full(cuts.size - 1, -np.inf)
        np.maximum.at(largest, rows, values[chosen])
        totals = np.bincount(rows, weights=values[chosen], minlength=cuts.size - 1)
        with np.errstate(invalid="ignore"):
            return cls(np.where(counts > 0, largest, np.nan), totals / counts)

    def of_kind(self, kind: str) -> NDArray[np.float64]:
        """Return `max` or `mean` by name, [N] in nats."""
        return self.largest if kind == "max" else self.mean


Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# The columns of the summaries whose means a population holds.
_POPULATION_COLUMNS = ("reward", "advantage", "length", "turns", "lag")


@dataclass(frozen=True, eq=False)
class Sequences:
    """The M rollouts, of N, that have a measured token.

    `measured` [N] is True for these M. `columns` maps names of the rollout summaries to float64 arrays [M], NaN if not
    logged; `clusters` [M] numbers the prompt groups.
    """

    measured: Booleans
    columns: dict[str, Float64]
    clusters: NDArray[np.int64]

    @classmethod
    def of(cls, summaries: RolloutSummaries) -> Sequences:
        """Return the sequences of these summaries."""
        measured = summaries.column("n_tokens") > 0
        names = (
            "n_tokens", "sum_d", "min_d", "max_d", "sum_k3", "sum_ratio_minus_one", "sum_tv", *_POPULATION_COLUMNS,
        )  # fmt: skip
        columns = {name: summaries.column(name)[measured].astype(np.float64) for name in names}
        _, clusters = np.unique(summaries.clusters()[measured], return_inverse=True)
        return cls(measured, columns, clusters)

    @property
    def count(self) -> int:
        """M."""
        return int(self.tokens.size)

    @property
    def tokens(self) -> Float64:
        """[M] measured tokens per sequence."""
        return self.columns["n_tokens"]

    @property
    def log_weights(self) -> Float64:
        """[M] log ρ_seq = Σ d, in nats."""
        return self.columns["sum_d"]

    @cached_property
    def total_tokens(self) -> float:
        """Measured tokens of all sequences."""
        return float(self.tokens.sum())

    @cached_property
    def ratios_minus_one(self) -> Float64:
        """[M] ρ_seq − 1; infinite on overflow."""
        with np.errstate(over="ignore"):
            return np.expm1(self.log_weights)

    @cached_property
    def mean_k3(self) -> Float64:
        """[M] mean k3 of the tokens of each sequence, in nats."""
        return self.columns["sum_k3"] / self.tokens

    @cached_property
    def largest_k3(self) -> Float64:
        """[M] largest k3 of a token of each sequence, in nats.

        k3 is convex in d with its minimum at 0, so the largest value is at the smallest or the largest d.
        """
        with np.errstate(over="ignore"):
            return np.maximum(k3_kl(self.columns["min_d"]), k3_kl(self.columns["max_d"]))

    @cached_property
    def group_sizes(self) -> NDArray[np.int64]:
        """[G] sequences per prompt group; a rollout without a group is a group of its own."""
        return np.bincount(self.clusters, minlength=1)

    def affected(self, touched: Booleans) -> AffectedRecord:
        """Compare the sequences that a correction touches (`touched` [M] is True) with the untouched ones."""
        real = self.group_sizes >= 2
        groups = int(real.sum())
        shares = (math.nan, math.nan)
        if groups:
            per_group = np.bincount(self.clusters[touched], minlength=self.group_sizes.size)[real]
            emptied = per_group == self.group_sizes[real]
            shares = (float((per_group > 0).sum() / groups), float(emptied.sum() / groups))
        return AffectedRecord(
            touched=self._population(touched),
            untouched=self._population(~touched),
            groups=groups,
            groups_touched=shares[0],
            groups_emptied=shares[1],
        )

    @cached_property
    def _all(self) -> PopulationRecord:
        return self._means(slice(None), self.count)

    def _population(self, chosen: Booleans) -> PopulationRecord:
        count = int(chosen.sum())
        return self._all if count == self.count else self._means(chosen, count)

    def _means(self, chosen: Booleans | slice, count: int) -> PopulationRecord:
        if count == 0:
            return NO_SEQUENCES
        means = {f"{name}_mean": self._mean_of(name, chosen) for name in _POPULATION_COLUMNS}
        return PopulationRecord(sequences=count, **means)

    def _mean_of(self, name: str, chosen: Booleans | slice) -> float:
        values = self.columns[name][chosen]
        return mean(values[np.isfinite(values)])


def undersampling_notes(sum_k3: Float64) -> tuple[str, ...]:
    """Return a note if 2·KL·T > ln N, from the Σ k3 of N sequences in nats [N]; else no note.

    The effective fraction of sequence weights is near exp(−2·KL·T), and N sequences cannot show less than 1/N.
    """
    spread, known = 2.0 * mean(sum_k3), math.log(max(sum_k3.size, 1))
    if spread <= known:
        return ()
    found = f"2·KL of a sequence is {spread:.3g}, more than ln N = {known:.3g}"
    return (f"{found}: the sequences that carry the weight were not sampled, so figures of ρ_seq are too small",)


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
        """Return E|w − ρ_t| over tokens for a mask; NaN if the correction weights whole sequences."""
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
