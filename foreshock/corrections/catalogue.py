"""The catalogue of corrections, their thresholds, and the form of a correction's evaluation.

ρ = π/μ of a token, ρ_seq is the product over a sequence, w the weight that the correction would give. A mask without a
ratio gives the weight 1 to the tokens or sequences that it keeps.

Thresholds are written as in verl: `2`, or `0.5_5` for a lower and an upper bound. Tokens and sequences are compared
with a threshold in log space, never by ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from foreshock.api.steps import AffectedRecord, PopulationRecord
from foreshock.errors import InvalidArgumentError


class Bounds(StrEnum):
    """The kinds of bounds that a correction takes."""

    NONE = "none"  # no threshold
    CAP = "cap"  # an upper bound of a ratio, at least 1
    UPPER = "upper"  # an upper bound of a ratio, and optionally a lower one
    RANGE = "range"  # both bounds of a ratio; C alone is short for 1/C to C
    DIVERGENCE = "divergence"  # an upper bound of a divergence, in nats
    FLOOR = "floor"  # a lower bound of a ratio, at most 1


@dataclass(frozen=True, slots=True)
class Threshold:
    """A lower and an upper bound of a ratio, or an upper bound of a divergence in nats. None means no bound."""

    lower: float | None = None
    upper: float | None = None

    @property
    def log_lower(self) -> float:
        """The lower bound of d; −inf if there is none."""
        if self.lower is None:
            return -math.inf
        # Negating the upper bound makes 1/C to C symmetric to the last bit.
        if self.upper is not None and self.lower == 1.0 / self.upper:
            return -math.log(self.upper)
        return math.log(self.lower)

    @property
    def log_upper(self) -> float:
        """The upper bound of d; inf if there is none."""
        return math.inf if self.upper is None else math.log(self.upper)

    def __str__(self) -> str:
        # Ten digits distinguish a threshold from a nearby exact level.
        bounds = [f"{bound:.10g}" for bound in (self.lower, self.upper) if bound is not None]
        return "_".join(bounds) or "none"


def _expected(lower: float | None, upper: float | None, bounds: Bounds) -> str:
    """Return a description of the expected bounds; an empty string if the given bounds fit."""
    if bounds is Bounds.FLOOR:
        fits = lower is not None and upper is None and lower <= 1.0
        return "" if fits else "one ratio of at most 1, such as 1e-4"
    if bounds is Bounds.DIVERGENCE:
        fits = lower is None and upper is not None
        return "" if fits else "one upper bound in nats, such as 0.01"
    if bounds is Bounds.CAP:
        fits = lower is None and upper is not None and upper >= 1.0
        return "" if fits else "one ratio of at least 1, such as 2"
    if bounds is Bounds.UPPER or bounds is Bounds.RANGE:
        fits = upper is not None and upper >= 1.0 and (lower is None or lower <= 1.0)
        return "" if fits else "an upper bound of at least 1 and a lower one of at most 1, such as 2 or 0.5_5"
    return ""


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


NO_SEQUENCES = PopulationRecord(
    sequences=0,
    reward_mean=math.nan,
    advantage_mean=math.nan,
    length_mean=math.nan,
    turns_mean=math.nan,
    lag_mean=math.nan,
)
_NOT_COMPARED = AffectedRecord(
    touched=NO_SEQUENCES, untouched=NO_SEQUENCES, groups=0, groups_touched=math.nan, groups_emptied=math.nan
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The effect that one correction would have on a batch; nothing is applied. NaN means not estimable.

    The figures are for the threshold `used`. It differs from `asked` if a token threshold lies between two edges of the
    histogram. `kept_tokens` and `kept_sequences` are fractions (a token correction keeps a sequence if it drops none of
    its tokens); `touched_tokens` is the fraction of tokens whose weight the threshold changes.

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


Level = Literal["token", "sequence"]
Effect = Literal["none", "truncated", "dropped"]

VERL = "verl, RolloutCorrectionConfig"
VERL_DOCS = "verl, docs/algo/rollout_corr.md"
COLLAPSE = "Liu, Li et al. 2025, When Speed Kills Stability"


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction. `effect` is what happens to a weight beyond the threshold; `usual` has the thresholds in use."""

    name: str
    title: str
    formula: str
    level: Level
    effect: Effect
    bounds: Bounds
    usual: tuple[Threshold, ...]
    source: str

    def threshold(self, text: str) -> Threshold:
        """Return the threshold that `text` names: `2`, or `0.5_5`. Raises InvalidArgumentError with a valid example."""
        try:
            numbers = [float(part) for part in text.split("_")]
        except ValueError:
            numbers = []
        if len(numbers) == 2:
            return self.check(Threshold(numbers[0], numbers[1]))
        if len(numbers) != 1:
            raise InvalidArgumentError(f"got {text!r}, expected a number, or lower_upper such as 0.5_5", "threshold")
        is_lower = self.bounds is Bounds.FLOOR
        return self.check(Threshold(lower=numbers[0]) if is_lower else Threshold(upper=numbers[0]))

    def check(self, threshold: Threshold) -> Threshold:
        """Return the threshold, with 1/C as the lower bound of a RANGE given as C. Raises InvalidArgumentError."""
        lower, upper = threshold.lower, threshold.upper
        for bound in (lower, upper):
            if bound is not None and not (math.isfinite(bound) and bound > 0.0):
                raise InvalidArgumentError(f"a bound must be a finite number above 0, got {bound}", "threshold")
        if self.bounds is Bounds.NONE and (lower is not None or upper is not None):
            raise InvalidArgumentError("this correction has no threshold: leave it out", "threshold")
        if self.bounds is Bounds.RANGE and lower is None and upper is not None and upper >= 1.0:
            lower = 1.0 / upper
        expected = _expected(lower, upper, self.bounds)
        if expected:
            raise InvalidArgumentError(f"expected {expected}, got {Threshold(lower, upper)}", "threshold")
        return Threshold(lower, upper)


_TWO = Threshold(upper=2.0)

_ALL = (
    Correction(
        "none", "no correction, tokens", "1", "token", "none", Bounds.NONE, (Threshold(),), "the uncorrected gradient",
    ),
    Correction(
        "token_is", "token IS", "ρ", "token", "none", Bounds.NONE, (Threshold(),), "importance sampling, untruncated",
    ),
    Correction(
        "token_tis", "token TIS", "min(ρ, C)", "token", "truncated", Bounds.CAP, (_TWO, Threshold(upper=5.0)),
        f"Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training; {VERL}: 2.0, "
        "typical 1.5 to 5",
    ),
    Correction(
        "token_mis", "token MIS", "ρ·1{ρ ≤ C}", "token", "dropped", Bounds.UPPER, (_TWO,), f"{COLLAPSE}; C as for TIS",
    ),
    Correction(
        "icepop", "IcePop", "ρ·1{C_lo ≤ ρ ≤ C_hi}", "token", "dropped", Bounds.RANGE,
        (Threshold(0.5, 5.0), Threshold(0.5, 2.0)),
        f"Ling team 2025, IcePop: [0.5, 5]; {VERL}.decoupled_token_icepop",
    ),
    Correction(
        "token_mask", "token mask", "1{C_lo ≤ ρ ≤ C_hi}", "token", "dropped", Bounds.RANGE, (Threshold(0.5, 2.0),),
        f"{VERL_DOCS}: rollout_rs token_k1, whose bounds are those of 1/ρ",
    ),
    Correction(
        "none_sequence", "no correction, sequences", "1", "sequence", "none", Bounds.NONE, (Threshold(),),
        "the uncorrected gradient",
    ),
    Correction(
        "sequence_is", "sequence IS", "ρ_seq", "sequence", "none", Bounds.NONE, (Threshold(),),
        "importance sampling, untruncated",
    ),
    Correction(
        "sequence_tis", "sequence TIS", "min(ρ_seq, C)", "sequence", "truncated", Bounds.CAP,
        (_TWO, Threshold(upper=10.0)), f"{VERL}: 2.0, typical 2 to 10",
    ),
    Correction(
        "sequence_mis", "sequence MIS", "ρ_seq·1{ρ_seq ≤ C}", "sequence", "dropped", Bounds.UPPER,
        (_TWO, Threshold(0.5, 2.0)), f"{COLLAPSE}, part 3; {VERL}.decoupled_seq_is_rs: 0.5 to 2",
    ),
    Correction(
        "geo_mis", "Geo-MIS", "1{C_lo ≤ exp(mean d) ≤ C_hi}", "sequence", "dropped", Bounds.RANGE,
        (Threshold(0.999, 1.001), Threshold(0.99, 1.01)),
        f"{COLLAPSE}, part 3; {VERL}.decoupled_geo_rs: 0.999 to 1.001 (there of 1/ρ)",
    ),
    Correction(
        "trm_max", "TRM, largest KL", "1{max KL_t ≤ δ}, exact KL of each token", "sequence", "dropped",
        Bounds.DIVERGENCE, (), "Li et al. 2025, Trust Region Masking, arXiv:2512.23075",
    ),
    Correction(
        "trm_mean", "TRM, mean KL", "1{mean KL_t ≤ δ}, exact KL of each token", "sequence", "dropped",
        Bounds.DIVERGENCE, (), "Li et al. 2025, Trust Region Masking, arXiv:2512.23075",
    ),
    Correction(
        "k3_rs_mean", "K3-RS, mean", "1{mean k3 ≤ δ}", "sequence", "dropped", Bounds.DIVERGENCE,
        (Threshold(upper=0.01),), f"{VERL}.decoupled_k3_rs: 0.01",
    ),
    Correction(
        "k3_rs_sum", "K3-RS, sum", "1{Σ k3 ≤ δ}", "sequence", "dropped", Bounds.DIVERGENCE, (Threshold(upper=2.5),),
        f"{VERL_DOCS}: rollout_rs seq_sum_k3; no preset, 2.5 in verl's own tests",
    ),
    Correction(
        "k3_rs_max", "K3-RS, largest", "1{max k3 ≤ δ}", "sequence", "dropped", Bounds.DIVERGENCE,
        (Threshold(upper=2.0),), f"{VERL_DOCS}: rollout_rs seq_max_k3; no preset, 2.0 in verl's own tests",
    ),
    Correction(
        "veto", "veto", "1{every ρ ≥ c}", "sequence", "dropped", Bounds.FLOOR, (Threshold(lower=1e-4),),
        "verl until 2025, rollout_token_veto_threshold: 1e-4",
    ),
)  # fmt: skip

CORRECTIONS: dict[str, Correction] = {correction.name: correction for correction in _ALL}


def correction_named(name: str) -> Correction:
    """Return the correction of that name. Raises InvalidArgumentError with the known names."""
    try:
        return CORRECTIONS[name]
    except KeyError:
        known = ", ".join(CORRECTIONS)
        raise InvalidArgumentError(f"unknown correction {name!r}; corrections: {known}", "correction") from None
