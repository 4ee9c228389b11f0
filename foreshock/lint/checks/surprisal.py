"""The surprisal test: check that −log μ of the sampled tokens averages to the entropy of μ.

`foreshock/lint/evidence/surprisal.py` describes the statistics and their source. The service also applies the test to
all steps of a run together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foreshock.lint.checks.outcomes import FALSE_ALARM, LEAST_GROUPS, Clean, Finding, NotChecked
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number, format_signed_percent
from foreshock.measures.estimators.intervals import student_t_quantile

__all__ = ["SurprisalSums", "check_surprisal", "sums_for_run", "target_excess"]

_CHECK = "raw_log_probs"
# Below this share of the entropy the difference may be that between μ and a π whose entropy was logged.
_LEAST_SHARE = 0.02
# The clustered test only has to agree: the bound that does not rely on the sample variance decides.
_CLUSTERED_CHANCE = 0.01
# The sample must be large enough to show a surprisal that is a fifth too small (top-p 0.9).
_DETECTABLE_SHARE = 0.2
_LARGEST_SURPRISAL = 12.0
# The ratio of surprisal to entropy if one of the two is in another base.
_BASES = {
    "log-probs in base 2": 1.0 / math.log(2),
    "log-probs in base 10": 1.0 / math.log(10),
    "an entropy in bits": math.log(2),
}
_BASE_NEAR = 0.02
# From this many broad tokens on, their sample variance is used, but at least this part of the bound.
_LEAST_BROAD_TOKENS = 500
_LEAST_PART_OF_BOUND = 0.125


@dataclass(frozen=True, slots=True)
class SurprisalSums:
    """Σ −log μ, Σ H and a bound of the variance over `tokens`, in nats, with the clustered z score.

    `z` is Σ_c S_c / √(Σ_c S_c²) of S = Σ(−log μ − H) over `clusters` independent parts: prompt groups, or steps.
    """

    tokens: int
    surprisal: float
    entropy: float
    variance: float
    largest: float
    clusters: int
    z: float
    unit: str = "prompt groups"

    @classmethod
    def of(cls, evidence: LintEvidence) -> SurprisalSums:
        """Return the sums of a batch or a step, clustered by prompt group."""
        return cls(
            tokens=evidence.count("surprisal_tokens"),
            surprisal=evidence.sum("surprisal"),
            entropy=evidence.sum("entropy"),
            variance=_variance(evidence),
            largest=evidence.extreme("largest_surprisal"),
            clusters=evidence.groups.count,
            z=evidence.groups.z_of_zero("surprisal"),
        )

    @property
    def t(self) -> float:
        """Student's t of z, with clusters − 1 degrees of freedom; ±inf if all clusters have the same sum."""
        if self.clusters < 2 or math.isnan(self.z):
            return math.nan
        left = self.clusters - self.z * self.z
        if left <= 1e-12 * self.clusters:
            return math.copysign(math.inf, self.z)
        return self.z * math.sqrt((self.clusters - 1) / left)

    def log_chance(self) -> float:
        """Return an upper bound of the log of the chance of such an excess if the logged μ sampled the tokens.

        A surprisal below the entropy is bounded as in `evidence/surprisal.py`, one above it by Bernstein's inequality
        with the largest surprisal seen.
        """
        excess, variance = self.surprisal - self.entropy, self.variance
        if excess > 0:
            variance += max(_LARGEST_SURPRISAL, self.largest) * excess / 3.0
        return -excess * excess / (2.0 * variance)

    def numbers(self) -> dict[str, float]:
        """Return the numbers of a finding by name; empty if there are no tokens."""
        if not self.tokens:
            return {}
        return {
            "tokens": self.tokens,
            "mean_surprisal": self.surprisal / self.tokens,
            "mean_entropy": self.entropy / self.tokens,
            "surprisal_z": self.z,
            self.unit.replace(" ", "_"): self.clusters,
        }


def check_surprisal(sums: SurprisalSums) -> Finding | Clean | NotChecked:
    """Return the outcome of the surprisal test alone."""
    if not sums.tokens:
        return NotChecked(_CHECK, "the surprisal test needs rollout_log_probs and entropy")
    if sums.clusters < LEAST_GROUPS:
        return NotChecked(_CHECK, f"the surprisal test needs {LEAST_GROUPS} {sums.unit}, and there are {sums.clusters}")
    needed = math.sqrt(-2.0 * math.log(FALSE_ALARM))
    if not sums.variance > 0 or _DETECTABLE_SHARE * sums.entropy < needed * math.sqrt(sums.variance):
        return NotChecked(
            _CHECK,
            f"the surprisal test needs more tokens: {sums.tokens:,} with {format_number(sums.entropy)} nats of entropy "
            "do not suffice",
        )
    excess = sums.surprisal - sums.entropy
    agrees = math.isnan(sums.t) or abs(sums.t) >= student_t_quantile(1 - _CLUSTERED_CHANCE / 2, sums.clusters - 1)
    if abs(excess) < _LEAST_SHARE * sums.entropy or sums.log_chance() > math.log(FALSE_ALARM) or not agrees:
        return Clean(_CHECK)
    ratio = sums.surprisal / sums.entropy
    base = [f" (or {words})" for words, factor in _BASES.items() if abs(ratio / factor - 1.0) <= _BASE_NEAR]
    meaning = (
        "the sampled tokens are likelier than the logged μ predicts: truncation, or a temperature below 1"
        if excess < 0
        else "the sampled tokens are less likely than the logged μ predicts: a temperature above 1, or the entropy of "
        "another distribution"
    )
    seen = (
        f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats over {sums.tokens:,} tokens, the entropy "
        f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(excess / sums.entropy)}); surprisal_z "
        f"{format_number(sums.z)} over {sums.clusters:,} {sums.unit}; {meaning}{''.join(base)}."
    )
    return Finding(_CHECK, "critical", seen, sums.numbers())


def sums_for_run(evidence: LintEvidence) -> SurprisalSums:
    """Return what a step adds to the test over its run: the sums of μ or those of π, whichever fit the entropy better.

    Trainers log the entropy of π. A lag moves it away from that of μ, in the same direction at every step.
    """
    sums = SurprisalSums.of(evidence)
    excess, of_target = sums.surprisal - sums.entropy, target_excess(evidence) * sums.entropy
    return replace(sums, surprisal=sums.entropy + of_target) if abs(of_target) < abs(excess) else sums


def target_excess(evidence: LintEvidence) -> float:
    """Return Σ(−ρ·log π − H) / Σ H: near 0 if the entropies are those of π and μ sampled; NaN if not estimable."""
    entropy = evidence.sum("target_entropy")
    return evidence.sum("target_surprisal") / entropy - 1.0 if entropy > 0 else math.nan


def _variance(evidence: LintEvidence) -> float:
    """Return the bound of the variance of Σ −log μ, in nats² (see `evidence/surprisal.py`)."""
    of_broad = evidence.sum("broad_bound")
    if evidence.count("broad_tokens") >= _LEAST_BROAD_TOKENS:
        of_broad = max(evidence.sum("broad_squares"), _LEAST_PART_OF_BOUND * of_broad)
    return max(evidence.sum("sharp_bound"), 0.0) + of_broad
