"""Token corrections, from sums over the tokens below the lower bound, between the bounds, and above the upper one.

Every sum is of ρ − 1, which keeps its precision near ρ = 1. E|w − ρ|, E[(w − ρ)·A] and the moments of w − 1 follow from
the sums of the three regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreshock.corrections.catalogue import Correction
from foreshock.corrections.results import Evaluation, WeightMoments
from foreshock.corrections.sequences import Sequences
from foreshock.corrections.sums import exact_sum
from foreshock.corrections.thresholds import Threshold
from foreshock.corrections.token_cuts import Cut, SideBins, SideSums
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.tails import ABOVE, BELOW

__all__ = ["TokenSums", "evaluate_tokens"]

# Below this mean of w², 1 + 2·E[w − 1] + E[(w − 1)²] cancels to too few digits.
_SMALLEST_SQUARE = 1e-9

# The corrections that keep a token with the weight 1 and not ρ.
_WITHOUT_RATIO = frozenset({"none", "token_mask"})


class TokenSums:
    """The tokens of a comparison, prepared for cuts at many thresholds."""

    def __init__(self, statistics: ComparisonStatistics) -> None:
        self.statistics = statistics
        self.below, self.above = SideBins(statistics, BELOW), SideBins(statistics, ABOVE)


def evaluate_tokens(
    correction: Correction, threshold: Threshold, tokens: TokenSums, sequences: Sequences
) -> Evaluation:
    """Return the effect of a token correction; `tokens` and `sequences` are of the same rollouts, and not empty."""
    statistics = tokens.statistics
    below, above = tokens.below.cut(-threshold.log_lower), tokens.above.cut(threshold.log_upper)
    used = Threshold(_used(threshold.lower, below, -1.0), _used(threshold.upper, above, 1.0))
    weights = _Weights(correction, used, statistics, below, above, (tokens.below.whole, tokens.above.whole))
    touched = above.is_beyond(sequences.columns["max_d"]) | below.is_beyond(-sequences.columns["min_d"])
    beyond = (below.beyond.tokens + above.beyond.tokens) / statistics.tokens
    drops = correction.effect == "dropped"
    distortion = weights.distortion()
    return Evaluation(
        correction,
        threshold,
        used,
        kept_tokens=1.0 - beyond if drops else 1.0,
        kept_sequences=float((~touched).sum() / touched.size) if drops else 1.0,
        touched_tokens=beyond,
        weights=weights.moments(),
        distortion=distortion,
        uncorrected_distortion=weights.uncorrected_distortion(),
        token_distortion=distortion,
        advantage_distortion=weights.advantage_distortion(),
        affected=sequences.affected(touched),
        notes=_notes(threshold, used),
    )


def _used(asked: float | None, cut: Cut, sign: float) -> float | None:
    if asked is None:
        return None
    used = math.exp(sign * cut.level)
    return asked if math.isclose(used, asked, rel_tol=1e-9) else used


def _notes(asked: Threshold, used: Threshold) -> tuple[str, ...]:
    if asked == used:
        return ()
    return (f"tokens are counted at the nearest edge of a histogram: these figures are for {used}, not {asked}",)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights that a token correction would give, as sums over the three regions."""

    correction: Correction
    used: Threshold
    statistics: ComparisonStatistics
    below: Cut
    above: Cut
    sides: tuple[SideSums, SideSums]

    @property
    def _keeps_ratio(self) -> bool:
        return self.correction.name not in _WITHOUT_RATIO

    @property
    def _beyond(self) -> tuple[SideSums, SideSums]:
        return self.below.beyond, self.above.beyond

    def distortion(self) -> float:
        """Return E|w − ρ| over tokens."""
        # With w = 1 for ρ this is |1 − ρ|, whose sign is that of d.
        kept = 0.0 if self._keeps_ratio else self.above.within.ratio_minus_one - self.below.within.ratio_minus_one
        if self.correction.effect == "truncated":
            beyond = self._cut_off()
        else:
            beyond = exact_sum(side.ratio_minus_one + side.tokens for side in self._beyond)
        return (kept + beyond) / self.statistics.tokens

    def uncorrected_distortion(self) -> float:
        """Return E|1 − ρ| over tokens."""
        below, above = self.sides
        return (above.ratio_minus_one - below.ratio_minus_one) / self.statistics.tokens

    def advantage_distortion(self) -> float:
        """Return E[(w − ρ)·A] over tokens with an advantage; NaN if there are none."""
        tokens = self.statistics.count("advantage_tokens")
        if not tokens:
            return math.nan
        if self.correction.effect == "truncated":
            side = self.above.beyond
            total = (self._cap - 1.0) * side.advantage - side.advantage_ratio_minus_one
        else:
            # With w = 1 for ρ, w − ρ is 1 − ρ, less 1 for a dropped token.
            changed = self._beyond if self._keeps_ratio else self.sides
            dropped = (side.advantage for side in self._beyond)
            total = 0.0 - exact_sum([*(side.advantage_ratio_minus_one for side in changed), *dropped])
        return total / tokens

    def moments(self) -> WeightMoments:
        """Return mean, variance and effective fraction of w."""
        tokens = self.statistics.tokens
        first = second = 0.0
        if self._keeps_ratio:
            first = self.above.within.ratio_minus_one + self.below.within.ratio_minus_one
            second = self.above.within.chi2 + self.below.within.chi2
        beyond = sum(side.tokens for side in self._beyond)
        weight = self._cap - 1.0 if self.correction.effect == "truncated" else -1.0
        if beyond:
            first += weight * beyond
            second += weight * weight * beyond
        # Per token: E[w − 1] and E[(w − 1)²].
        first, second = first / tokens, second / tokens
        total, square = 1.0 + first, 1.0 + 2.0 * first + second
        effective = total * total / square if _SMALLEST_SQUARE < square < math.inf else math.nan
        if self._keeps_ratio and self.correction.effect == "none":
            effective = self.statistics.token_weights.effective_fraction()
        variance = max(second - first * first, 0.0) if math.isfinite(second) else math.inf
        return WeightMoments(total, variance, effective)

    @property
    def _cap(self) -> float:
        return self.used.upper if self.used.upper is not None else math.inf

    def _cut_off(self) -> float:
        """Return Σ (ρ − C) beyond the cap C."""
        side = self.above.beyond
        return side.ratio_minus_one - (self._cap - 1.0) * side.tokens if side.tokens else 0.0
