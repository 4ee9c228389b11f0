"""The results of evaluating a correction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foreshock.corrections.catalogue import Correction
from foreshock.corrections.thresholds import Threshold

__all__ = ["AffectedSequences", "Evaluation", "Population", "WeightMoments"]


@dataclass(frozen=True, slots=True)
class Population:
    """A number of sequences and the means of their logged values; NaN if a value was not logged.

    `length` is in model-generated tokens, `lag` in weights versions.
    """

    sequences: int
    reward: float = math.nan
    advantage: float = math.nan
    length: float = math.nan
    turns: float = math.nan
    lag: float = math.nan


@dataclass(frozen=True, slots=True)
class AffectedSequences:
    """The sequences that a correction would drop or truncate (`touched`), and the others.

    A token correction touches a sequence if it touches at least one of its tokens. Of the prompt groups of two or more
    sequences, `groups_touched` is the share with a touched sequence, `groups_emptied` the share with all sequences
    touched; NaN if there is no such group.
    """

    touched: Population
    untouched: Population
    groups: int = 0
    groups_touched: float = math.nan
    groups_emptied: float = math.nan


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The effect that one correction would have on a batch; nothing is applied. NaN means not estimable.

    `used` is the threshold of the figures. It differs from `asked` if a token threshold lies between two edges of the
    histogram. `kept_tokens` and `kept_sequences` are fractions (a token correction keeps a sequence if it drops none of
    its tokens); `touched_tokens` is the fraction whose weight the threshold changes.

    `distortion` is E|w − ρ| and `advantage_distortion` E[(w − ρ)·A], over the tokens or sequences of the correction's
    level (for the latter: those with an advantage); `uncorrected_distortion` is E|1 − ρ| over the same.
    `token_distortion` is E|w − ρ| over tokens with the ρ of the token, at either level; NaN if the weight is that of a
    whole sequence.
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
    affected: AffectedSequences = field(default_factory=lambda: AffectedSequences(Population(0), Population(0)))
    not_estimable: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the figures are for the threshold that was asked for."""
        return self.asked == self.used
