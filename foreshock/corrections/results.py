"""What the evaluation of a correction says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foreshock.corrections.catalogue import Correction
from foreshock.corrections.thresholds import Threshold

__all__ = ["Casualties", "Evaluation", "Population", "WeightMoments"]


@dataclass(frozen=True, slots=True)
class Population:
    """Some sequences: how many, and the means of what was logged of them; NaN where nothing was.

    `length` is in model-generated tokens, `lag` in weights versions.
    """

    sequences: int
    reward: float = math.nan
    advantage: float = math.nan
    length: float = math.nan
    turns: float = math.nan
    lag: float = math.nan


@dataclass(frozen=True, slots=True)
class Casualties:
    """Who would be lost (or truncated): `touched` sequences against `untouched` ones.

    A token correction touches a sequence where it touches at least one of its tokens. Of the prompt groups of two or
    more sequences, `groups_touched` is the share that a sequence is touched of, `groups_emptied` the share that all
    are; NaN where there is no such group.
    """

    touched: Population
    untouched: Population
    groups: int = 0
    groups_touched: float = math.nan
    groups_emptied: float = math.nan


@dataclass(frozen=True, slots=True)
class WeightMoments:
    """Of the corrected weights w, zeros of what is lost included, over all tokens or sequences.

    `variance` is that of the population; `effective_fraction` (Σw)²/(N Σw²), unclamped, NaN where nothing is kept.
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
    """What one correction would do to a batch. Nothing was applied. NaN means not estimable.

    `used` is the threshold that the figures are for; it differs from `asked` where a token threshold lies between the
    edges of the histogram. `kept_tokens` and `kept_sequences` are fractions (a sequence is kept by a token correction
    where none of its tokens is lost); `touched_tokens` is the fraction whose weight the threshold changes.

    `distortion` is E|w − ρ| and `advantage_distortion` E[(w − ρ)·A], over the tokens or sequences of the correction's
    level, those with an advantage; `uncorrected_distortion` is E|1 − ρ| there. `token_distortion` is E|w − ρ| over
    tokens with ρ of the token, whatever the level; NaN where the weight is that of a whole sequence.
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
    casualties: Casualties = field(default_factory=lambda: Casualties(Population(0), Population(0)))
    not_estimable: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the figures are for the very threshold that was asked for."""
        return self.asked == self.used
