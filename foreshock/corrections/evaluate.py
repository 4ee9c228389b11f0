"""Evaluate corrections of a comparison from its statistics and rollout summaries.

A correction weights parts: the regions of d in the sums over tokens, or single sequences. Each part lies on one side of
d = 0 and within or beyond the threshold as a whole, so that every figure follows from the part's sums of ρ − 1,
(ρ − 1)², A and A·(ρ − 1), at either level in the same way. Sums of ρ − 1 keep their digits near ρ = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.api.steps import AffectedRecord
from foreshock.corrections.catalogue import CORRECTIONS, Correction, Threshold, correction_named
from foreshock.corrections.sequences import NO_SEQUENCES, Booleans, Float64, Sequences, mean
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.tails import (
    ABOVE,
    BELOW,
    FIRST_REGION,
    REGION_BEYOND,
    REGIONS,
    TAIL_LEVELS,
)

# Two levels closer than this are the same: differences of float32 log-probs do not resolve them.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class WeightMoments:
    """Moments of the corrected weights w over all tokens or sequences; a dropped one has w = 0.

    `variance` is the population variance. `effective_fraction` is (Σw)²/(N Σw²), unclamped; NaN if nothing is kept.
    """

    mean: float
    variance: float
    effective_fraction: float

    @property
    def standard_deviation(self) -> float:
        """√variance."""
        return math.sqrt(self.variance)


_NOT_COMPARED = AffectedRecord(
    touched=NO_SEQUENCES, untouched=NO_SEQUENCES, groups=0, groups_touched=math.nan, groups_emptied=math.nan
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The effect that one correction would have on a batch; nothing is applied. NaN means not estimable.

    The figures are for the threshold `used`. It differs from `asked` if a token threshold lies between two edges of the
    regions, with tokens beside it. `kept_tokens` and `kept_sequences` are fractions (a token correction keeps a
    sequence if it drops none of its tokens); `touched_tokens` is the fraction of tokens whose weight the threshold
    changes. Sequences are whole rollouts; a note counts the others.

    `distortion` is E|w − ρ| and `uncorrected_distortion` is E|1 − ρ|, over the tokens or sequences of the correction's
    level. `advantage_distortion` is E[(w − ρ)·A] over those with an advantage. `token_distortion` is E|w − ρ| over
    tokens with the ρ of the token, at either level; NaN if the correction weights whole sequences.
    """

    correction: Correction
    asked: Threshold
    used: Threshold
    kept_tokens: float = math.nan
    kept_sequences: float = math.nan
    touched_tokens: float = math.nan
    weights: WeightMoments = field(default_factory=lambda: WeightMoments(math.nan, math.nan, math.nan))
    distortion: float = math.nan
    uncorrected_distortion: float = math.nan
    token_distortion: float = math.nan
    advantage_distortion: float = math.nan
    affected: AffectedRecord = _NOT_COMPARED
    not_estimable: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the figures are for the threshold that was asked for."""
        return self.asked == self.used


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Sums over the tokens or sequences of each part, [P]; `advantages` of all of them have an advantage."""

    count: Float64
    above: Float64  # Σ (ρ − 1)
    squares: Float64  # Σ (ρ − 1)²
    advantage: Float64  # Σ A
    advantage_above: Float64  # Σ A·(ρ − 1)
    advantages: int

    @classmethod
    def of_tokens(cls, statistics: ComparisonStatistics) -> _Parts:
        """Return the regions of d: those of BELOW, then those of ABOVE."""
        sums = statistics.region_sums.reshape(2 * REGIONS, -1)
        counts = statistics.region_tokens.ravel().astype(np.float64)
        above, squares, advantage, products = sums.T
        return cls(counts, above, squares, advantage, products, statistics.count("advantage_tokens"))

    @classmethod
    def of_sequences(cls, sequences: Sequences) -> _Parts:
        """Return one part for each sequence."""
        known = np.isfinite(sequences.columns["advantage"])
        advantage = np.where(known, sequences.columns["advantage"], 0.0)
        with np.errstate(over="ignore"):
            above = np.expm1(sequences.log_weights)
            squares = np.square(above)
            # An infinite ρ_seq times an advantage of 0 would be NaN.
            products = np.multiply(advantage, above, where=advantage != 0.0, out=np.zeros_like(above))
        return cls(np.ones(known.size), above, squares, advantage, products, int(known.sum()))

    # Infinite ratios give infinite figures; infinities of both signs give NaN.
    @np.errstate(over="ignore", invalid="ignore")
    def distortions(self, correction: Correction, cap: float, touched: Booleans) -> dict[str, Any]:
        """Return E|w − ρ|, E|1 − ρ|, and E[(w − ρ)·A] over those with an advantage, NaN if there are none."""
        keeps_ratio, truncated = correction.weight == "ρ", correction.effect == "truncated"
        # Beyond the threshold w is 0, or the cap C, which is below ρ.
        off = self.above - (cap - 1.0) * self.count if truncated else self.above + self.count
        signed = (cap - 1.0) * self.advantage if truncated else -self.advantage
        within = np.zeros_like(off) if keeps_ratio else np.abs(self.above)
        of_advantage = np.zeros_like(off) if keeps_ratio else -self.advantage_above
        products = np.where(touched, signed - self.advantage_above, of_advantage)
        return {
            "distortion": float(np.where(touched, off, within).sum()) / self.count.sum(),
            "uncorrected_distortion": float(np.abs(self.above).sum() / self.count.sum()),
            "advantage_distortion": float(products.sum() + 0.0) / self.advantages if self.advantages else math.nan,
        }

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def moments(self, correction: Correction, cap: float, touched: Booleans) -> WeightMoments:
        """Return mean, variance and effective fraction of w."""
        beyond = cap - 1.0 if correction.effect == "truncated" else -1.0
        keeps_ratio = correction.weight == "ρ"
        # Σ (w − 1) and Σ (w − 1)² of each part.
        first = np.where(touched, beyond * self.count, self.above if keeps_ratio else 0.0)
        second = np.where(touched, beyond * beyond * self.count, self.squares if keeps_ratio else 0.0)
        filled = self.count > 0
        first, second, count = first[filled], second[filled], self.count[filled]
        total = count.sum()
        center = float(first.sum() / total)
        if not math.isfinite(center):
            return WeightMoments(1.0 + center, math.inf, math.nan)
        # The variance within parts, and that between them.
        within = np.maximum(second - first * (first / count), 0.0)
        variance = float((within + count * np.square(first / count - center)).sum() / total)
        weight = float((count + first).sum() / total)
        square = weight * weight + variance
        return WeightMoments(weight, variance, weight * weight / square if 0.0 < square < math.inf else math.nan)


class Evaluator:
    """Evaluate any number of corrections and thresholds on the rollouts of one comparison.

    Raises InvalidArgumentError if the arguments describe different rollouts.
    """

    def __init__(self, statistics: ComparisonStatistics, summaries: RolloutSummaries) -> None:
        tokens = int(summaries.column("n_tokens").sum()) if summaries.num_rollouts else 0
        if tokens != statistics.tokens or summaries.num_rollouts != statistics.rollouts:
            raise InvalidArgumentError(
                f"must be of the same rollouts as the statistics, got {summaries.num_rollouts} rollouts with {tokens} "
                f"tokens, and statistics of {statistics.rollouts} with {statistics.tokens}",
                "summaries",
            )
        self._statistics = statistics
        self._sequences = Sequences.of(summaries)
        self._parts = {"token": _Parts.of_tokens(statistics), "sequence": _Parts.of_sequences(self._sequences)}

    def evaluate(self, name: str, threshold: Threshold | None = None) -> Evaluation:
        """Return the effect of the correction `name` at `threshold`; by default at its first usual threshold.

        Sequence thresholds are exact. Token thresholds are exact at ratios of 1, 2, e, 5, 10 and so on (TAIL_LEVELS);
        otherwise, if tokens lie between, the nearest edge of a region is used and reported in `used`. Raises
        InvalidArgumentError for an unknown name or a threshold that does not fit the correction.
        """
        correction = correction_named(name)
        threshold = correction.usual[0] if threshold is None else correction.check(threshold)
        missing = None
        if not self._statistics.tokens:
            missing = "no token has two finite log-probs"
        elif correction.level == "sequence" and not self._sequences.count:
            missing = "no rollout has two finite log-probs for each of its tokens"
        if missing:
            return Evaluation(correction, threshold, threshold, not_estimable=missing)
        return (self._of_tokens if correction.level == "token" else self._of_sequences)(correction, threshold)

    def evaluate_usual(self) -> tuple[Evaluation, ...]:
        """Return every correction at each of its usual thresholds, in the order of the catalogue."""
        return tuple(self.evaluate(name, threshold) for name, each in CORRECTIONS.items() for threshold in each.usual)

    def _of_tokens(self, correction: Correction, threshold: Threshold) -> Evaluation:
        below, above = self._cut(-threshold.log_lower, BELOW), self._cut(threshold.log_upper, ABOVE)
        used = Threshold(_used(threshold.lower, -below.level), _used(threshold.upper, above.level))
        parts, sequences = self._parts["token"], self._sequences
        regions = np.arange(REGIONS)
        touched = np.concatenate([regions >= below.region, regions >= above.region])
        hit = above.is_beyond(sequences.columns["max_d"]) | below.is_beyond(-sequences.columns["min_d"])
        beyond = float(parts.count[touched].sum() / parts.count.sum())
        drops = correction.effect == "dropped"
        cap = math.inf if used.upper is None else used.upper
        weights = parts.moments(correction, cap, touched)
        if correction.name == "token_is":
            # From sums in log space, which are finite even if ρ² overflows.
            effective = self._statistics.token_weights.effective_fraction()
            weights = WeightMoments(weights.mean, weights.variance, effective)
        distortions = parts.distortions(correction, cap, touched)
        note = f"tokens are counted at the nearest edge of a histogram: these figures are for {used}, not {threshold}"
        return Evaluation(
            correction,
            threshold,
            used,
            kept_tokens=1.0 - beyond if drops else 1.0,
            kept_sequences=mean((~hit).astype(np.float64)) if drops else 1.0,
            touched_tokens=beyond,
            weights=weights,
            **distortions,
            token_distortion=distortions["distortion"],
            affected=sequences.affected(hit),
            notes=() if threshold == used else (note,),
        )

    def _cut(self, level: float, side: int) -> _Cut:
        """Cut a side at `level`; the cut at the nearest edge is exact if the histogram has no token between them."""
        cut = _Cut.at(level, side)
        if math.isinf(level):
            return cut
        first, last = LOG_RATIO_GRID.bins(np.sort([level, cut.level])).tolist()
        between = int(self._statistics.histogram[side, first : last + 1].sum())
        return cut if between else replace(cut, level=level, keeps_level=True)

    def _of_sequences(self, correction: Correction, threshold: Threshold) -> Evaluation:
        assert correction.statistic is not None
        parts, sequences = self._parts["sequence"], self._sequences
        lower, upper = correction.limits(threshold)
        values = correction.statistic(sequences)
        touched = (values > upper) | (values < lower)
        dropped = touched & (correction.effect == "dropped")
        cap = math.inf if threshold.upper is None else threshold.upper
        weights = parts.moments(correction, cap, touched)
        # In log space, so that the effective fraction is finite even if w overflows.
        logs = sequences.log_weights if correction.weight == "ρ" else np.zeros(touched.size)
        logs = (np.minimum(logs, upper) if correction.effect == "truncated" else logs)[~dropped]
        effective = LogWeights.of(logs).effective_fraction() * logs.size / touched.size
        tokens, total = sequences.tokens, float(sequences.tokens.sum())
        above, of_tokens = sequences.columns["sum_ratio_minus_one"], math.nan
        if correction.weight == "1":
            # |1 − ρ| = (ρ − 1) + 2 (1 − ρ)⁺
            off = np.where(dropped, above + tokens, above + 2.0 * sequences.columns["sum_tv"])
            of_tokens = mean(off) * off.size / total
        return Evaluation(
            correction,
            threshold,
            threshold,
            kept_tokens=float(tokens[~dropped].sum() / total),
            kept_sequences=float((~dropped).sum() / dropped.size),
            touched_tokens=float(tokens[touched].sum() / total),
            weights=WeightMoments(weights.mean, weights.variance, effective),
            **parts.distortions(correction, cap, touched),
            token_distortion=of_tokens,
            affected=sequences.affected(touched),
            notes=sequences.notes(),
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A cut of one side at `level` nats of |d|: the regions from `region` on are beyond it.

    A token exactly at the level is within if `keeps_level` is True, else beyond.
    """

    level: float
    region: int
    keeps_level: bool = True

    @classmethod
    def at(cls, level: float, side: int) -> _Cut:
        """Cut a side (BELOW or ABOVE) at `level` ≥ 0, or at the nearest edge of its regions; inf does not cut."""
        if math.isinf(level):
            return cls(level, REGIONS)
        kept = min(range(len(TAIL_LEVELS)), key=lambda index: abs(TAIL_LEVELS[index] - level))
        edge = int(WEIGHT_GRID.bins(np.array([level]))[0])
        if WEIGHT_GRID.upper_edge(edge) - level < level - WEIGHT_GRID.lower_edge(edge):
            edge += 1
        # The first region of BELOW also holds the tokens with d = 0, which are within any level.
        edge = max(edge, 1 if side == BELOW else 0)
        at_edge = WEIGHT_GRID.lower_edge(edge)
        if abs(TAIL_LEVELS[kept] - level) <= max(_SAME, abs(at_edge - level)):
            return cls(TAIL_LEVELS[kept], REGION_BEYOND[kept])
        # At level 0 the whole side ABOVE is beyond; tokens with d = 0 are in BELOW.
        return cls(at_edge, int(FIRST_REGION[edge]), keeps_level=edge == 0)

    def is_beyond(self, sizes: NDArray[np.float64]) -> Booleans:
        """Return True for each |d| of this side that lies beyond the level."""
        return sizes > self.level if self.keeps_level else sizes >= self.level


def _used(asked: float | None, log_used: float) -> float | None:
    if asked is None:
        return None
    used = math.exp(log_used)
    return asked if math.isclose(used, asked, rel_tol=1e-9) else used
