"""The catalogue of corrections: one table, with the weight that each gives and what it compares with its threshold.

ρ = π/μ of a token, ρ_seq is the product over a sequence, w the weight that the correction would give. A mask without a
ratio gives the weight 1 to the tokens or sequences that it keeps.

Thresholds are written as in verl: `2`, or `0.5_5` for a lower and an upper bound. Tokens and sequences are compared
with a threshold in log space, never by ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from foreshock.corrections.sequences import Float64, Sequences
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


Level = Literal["token", "sequence"]
Effect = Literal["none", "truncated", "dropped"]
Weight = Literal["ρ", "1"]
Statistic = Callable[[Sequences], Float64]

VERL = "verl, RolloutCorrectionConfig"
VERL_DOCS = "verl, docs/algo/rollout_corr.md"
COLLAPSE = "Liu, Li et al. 2025, When Speed Kills Stability"


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction.

    `weight` is that of a token or sequence within the threshold, `effect` what happens to it beyond. `usual` has the
    thresholds in use. A correction of sequences compares `statistic`, [M], with the threshold: the logarithm of a
    ratio, or a divergence in nats; one of tokens compares d.
    """

    name: str
    title: str
    formula: str
    level: Level
    effect: Effect
    weight: Weight
    bounds: Bounds
    usual: tuple[Threshold, ...]
    source: str
    statistic: Statistic | None = None

    def limits(self, threshold: Threshold) -> tuple[float, float]:
        """Return the bounds of `statistic`, or of d, in nats."""
        if self.bounds is Bounds.DIVERGENCE:
            return -math.inf, math.inf if threshold.upper is None else threshold.upper
        return threshold.log_lower, threshold.log_upper

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
        if self.bounds is Bounds.NONE:
            if threshold != Threshold():
                raise InvalidArgumentError("this correction has no threshold: leave it out", "threshold")
            return threshold
        if self.bounds is Bounds.RANGE and lower is None and upper is not None and upper >= 1.0:
            lower = 1.0 / upper
        below, above = lower is None or lower <= 1.0, upper is not None and upper >= 1.0
        fits, expected = {
            Bounds.FLOOR: (upper is None and lower is not None and below, "one ratio of at most 1, such as 1e-4"),
            Bounds.DIVERGENCE: (lower is None and upper is not None, "one upper bound in nats, such as 0.01"),
            Bounds.CAP: (lower is None and above, "one ratio of at least 1, such as 2"),
        }.get(
            self.bounds,
            (above and below, "an upper bound of at least 1 and a lower one of at most 1, such as 2 or 0.5_5"),
        )
        if not fits:
            raise InvalidArgumentError(f"expected {expected}, got {Threshold(lower, upper)}", "threshold")
        return Threshold(lower, upper)


def _log_ratio(sequences: Sequences) -> Float64:
    return sequences.log_weights


_TWO = Threshold(upper=2.0)
_NO = (Threshold(),)

_ALL = (
    Correction(
        "none", "no correction, tokens", "1", "token", "none", "1", Bounds.NONE, _NO, "the uncorrected gradient",
    ),
    Correction(
        "token_is", "token IS", "ρ", "token", "none", "ρ", Bounds.NONE, _NO, "importance sampling, untruncated",
    ),
    Correction(
        "token_tis", "token TIS", "min(ρ, C)", "token", "truncated", "ρ", Bounds.CAP, (_TWO, Threshold(upper=5.0)),
        f"Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training; {VERL}: 2.0, "
        "typical 1.5 to 5",
    ),
    Correction(
        "token_mis", "token MIS", "ρ·1{ρ ≤ C}", "token", "dropped", "ρ", Bounds.UPPER, (_TWO,),
        f"{COLLAPSE}; C as for TIS",
    ),
    Correction(
        "icepop", "IcePop", "ρ·1{C_lo ≤ ρ ≤ C_hi}", "token", "dropped", "ρ", Bounds.RANGE,
        (Threshold(0.5, 5.0), Threshold(0.5, 2.0)),
        f"Ling team 2025, IcePop: [0.5, 5]; {VERL}.decoupled_token_icepop",
    ),
    Correction(
        "token_mask", "token mask", "1{C_lo ≤ ρ ≤ C_hi}", "token", "dropped", "1", Bounds.RANGE,
        (Threshold(0.5, 2.0),), f"{VERL_DOCS}: rollout_rs token_k1, whose bounds are those of 1/ρ",
    ),
    Correction(
        "none_sequence", "no correction, sequences", "1", "sequence", "none", "1", Bounds.NONE, _NO,
        "the uncorrected gradient", _log_ratio,
    ),
    Correction(
        "sequence_is", "sequence IS", "ρ_seq", "sequence", "none", "ρ", Bounds.NONE, _NO,
        "importance sampling, untruncated", _log_ratio,
    ),
    Correction(
        "sequence_tis", "sequence TIS", "min(ρ_seq, C)", "sequence", "truncated", "ρ", Bounds.CAP,
        (_TWO, Threshold(upper=10.0)), f"{VERL}: 2.0, typical 2 to 10", _log_ratio,
    ),
    Correction(
        "sequence_mis", "sequence MIS", "ρ_seq·1{ρ_seq ≤ C}", "sequence", "dropped", "ρ", Bounds.UPPER,
        (_TWO, Threshold(0.5, 2.0)), f"{COLLAPSE}, part 3; {VERL}.decoupled_seq_is_rs: 0.5 to 2", _log_ratio,
    ),
    Correction(
        "geo_mis", "Geo-MIS", "1{C_lo ≤ exp(mean d) ≤ C_hi}", "sequence", "dropped", "1", Bounds.RANGE,
        (Threshold(0.999, 1.001), Threshold(0.99, 1.01)),
        f"{COLLAPSE}, part 3; {VERL}.decoupled_geo_rs: 0.999 to 1.001 (there of 1/ρ)",
        lambda each: each.log_weights / each.tokens,
    ),
    Correction(
        "k3_rs_mean", "K3-RS, mean", "1{mean k3 ≤ δ}", "sequence", "dropped", "1", Bounds.DIVERGENCE,
        (Threshold(upper=0.01),), f"{VERL}.decoupled_k3_rs: 0.01",
        lambda each: each.columns["sum_k3"] / each.tokens,
    ),
    Correction(
        "k3_rs_sum", "K3-RS, sum", "1{Σ k3 ≤ δ}", "sequence", "dropped", "1", Bounds.DIVERGENCE,
        (Threshold(upper=2.5),), f"{VERL_DOCS}: rollout_rs seq_sum_k3; no preset, 2.5 in verl's own tests",
        lambda each: each.columns["sum_k3"],
    ),
    Correction(
        "k3_rs_max", "K3-RS, largest", "1{max k3 ≤ δ}", "sequence", "dropped", "1", Bounds.DIVERGENCE, (_TWO,),
        f"{VERL_DOCS}: rollout_rs seq_max_k3; no preset, 2.0 in verl's own tests",
        lambda each: each.largest_k3,
    ),
    Correction(
        "veto", "veto", "1{every ρ ≥ c}", "sequence", "dropped", "1", Bounds.FLOOR, (Threshold(lower=1e-4),),
        "verl until 2025, rollout_token_veto_threshold: 1e-4", lambda each: each.columns["min_d"],
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
