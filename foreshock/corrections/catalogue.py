"""The catalogue of corrections: formula, level, effect, usual thresholds and source of each.

ρ = π/μ of a token, ρ_seq is the product over a sequence, w the weight that the correction would give. A mask without a
ratio gives the weight 1 to what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreshock.corrections.thresholds import Bounds, Threshold, checked, parse_threshold
from foreshock.errors import InvalidArgumentError

__all__ = ["CORRECTIONS", "Correction", "correction_named"]

Level = Literal["token", "sequence"]
Effect = Literal["none", "truncated", "dropped"]

VERL = "verl, RolloutCorrectionConfig"
VERL_DOCS = "verl, docs/algo/rollout_corr.md"
COLLAPSE = "Liu, Li et al. 2025, When Speed Kills Stability"


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction. `effect` is what happens to a weight beyond the threshold; `usual` are the thresholds in use."""

    name: str
    title: str
    formula: str
    level: Level
    effect: Effect
    bounds: Bounds
    usual: tuple[Threshold, ...]
    source: str

    def threshold(self, text: str) -> Threshold:
        """Return the threshold that `text` names, such as `2` or `0.5_5`. Raises InvalidArgumentError."""
        return parse_threshold(text, self.bounds)

    def check(self, threshold: Threshold) -> Threshold:
        """Return the threshold with both bounds filled in. Raises InvalidArgumentError if it does not fit."""
        return checked(threshold, self.bounds)


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
