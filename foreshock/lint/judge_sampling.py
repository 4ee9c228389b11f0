"""Judge whether the logged μ is the law that sampled: by what is declared, and by the surprisal test."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import FALSE_ALARM, Clean, Finding, NotChecked, Outcome, number
from foreshock.lint.judge_pairs import LEAST_GROUPS
from foreshock.measures.estimators.intervals import student_t_quantile

__all__ = ["SurprisalSums", "judge_surprisal", "sums_for_run", "surprisal_outcome"]

_CHECK = "raw_log_probs"
# Below this share of the entropy the difference may be that between μ and a π whose entropy was logged.
_LEAST_SHARE = 0.02
# The clustered test has only to agree: the bound that does not trust the sample's own variance carries the weight.
_CLUSTERED_CHANCE = 0.01
# A sample that would not show a fifth too little surprisal (top-p 0.9) has not been tested.
_WANTED_SHARE = 0.2
_LARGEST_SURPRISAL = 12.0
# The entropy is that of π where π fits it so much better than μ does.
_SHARE_OF_TARGET = 1.0 / 3.0
# Raw log-probs leave ρ near 1, so that both fit it as badly; where π is much nearer, the data do not say what is wrong.
_SHARE_OF_BOTH = 0.75
# A factor of two bases between surprisal and entropy is worth a word.
_BASES = {
    "log-probs in base 2": 1.0 / math.log(2),
    "log-probs in base 10": 1.0 / math.log(10),
    "an entropy in bits": math.log(2),
}
_BASE_NEAR = 0.02
# So many broad tokens show their own variance, if not less than this part of the bound.
_LEAST_BROAD_TOKENS = 500
_LEAST_PART_OF_BOUND = 0.125


@dataclass(frozen=True, slots=True)
class SurprisalSums:
    """What the surprisal test works on: Σ −log μ, Σ H and a bound of the variance over `tokens`, in nats; `z` is
    Σ_c S_c / √(Σ_c S_c²) of S = Σ(−log μ − H) over `clusters` independent parts (prompt groups, or steps)."""

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
        """Those of a batch or a step, clustered by prompt group."""
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
        """z as Student's t with one degree of freedom less than clusters; ±inf where all clusters have one sum."""
        if self.clusters < 2 or math.isnan(self.z):
            return math.nan
        left = self.clusters - self.z * self.z
        if left <= 1e-12 * self.clusters:
            return math.copysign(math.inf, self.z)
        return self.z * math.sqrt((self.clusters - 1) / left)

    def log_chance(self) -> float:
        """An upper bound of the log of the chance of so large an excess where the logged μ sampled.

        Below 0 as `surprisal.py` says, above it Bernstein's inequality with the largest surprisal seen.
        """
        excess, variance = self.surprisal - self.entropy, self.variance
        if excess > 0:
            variance += max(_LARGEST_SURPRISAL, self.largest) * excess / 3.0
        return -excess * excess / (2.0 * variance)

    def numbers(self) -> dict[str, float]:
        """As evidence; empty where there are none."""
        if not self.tokens:
            return {}
        return {
            "tokens": self.tokens,
            "mean_surprisal": self.surprisal / self.tokens,
            "mean_entropy": self.entropy / self.tokens,
            "surprisal_z": self.z,
            self.unit.replace(" ", "_"): self.clusters,
        }


def judge_surprisal(evidence: LintEvidence, *, unreliable: str = "", covered: bool = True) -> tuple[Outcome, Outcome]:
    """Raw log-probs under temperature or truncation, and entropies of π in the place of those of μ.

    `unreliable` says why the surprisal test cannot be made; `covered`: mean ρ is not known to be off 1.
    """
    sums = SurprisalSums.of(evidence)
    other: Outcome = _entropy_not_checked(evidence, unreliable)
    tested: Finding | Clean | NotChecked = surprisal_outcome(sums)
    if unreliable:
        tested = NotChecked(_CHECK, unreliable)
    elif isinstance(tested, Finding) and covered:
        if found := _entropy_of_trainer(evidence, sums):
            tested, other = NotChecked(_CHECK, "`entropy` is that of π and not of μ"), found
        elif _target_excess(evidence) / (sums.surprisal / sums.entropy - 1.0) < _SHARE_OF_BOTH:
            tested = NotChecked(_CHECK, "`entropy` fits neither μ nor π, which are far apart: log that of μ")
    if declared := evidence.count("raw_and_shaped"):
        seen = (
            f"{declared:,} of {evidence.count('rollouts'):,} rollouts were sampled with {_parameters(evidence)}, and "
            f"the engine logs raw_logprobs, before these are applied{_also(tested)}."
        )
        return Finding(_CHECK, "bad", seen, sums.numbers()), other
    if unreliable or not isinstance(tested, NotChecked) or isinstance(other, Finding):
        return tested, other
    if evidence.count("shaped_mode_unknown"):
        why = f"sampled with {_parameters(evidence)}, and logprobs_mode is not said; {tested.why}"
        return NotChecked(_CHECK, why), other
    plain = evidence.count("sampling_unknown") == 0 and evidence.count("declared_shaped") == 0
    if plain or evidence.count("mode_processed") == evidence.count("rollouts"):
        return Clean(_CHECK, f"by what is declared of sampling only; {tested.why}"), other
    return tested, other


def sums_for_run(evidence: LintEvidence) -> SurprisalSums:
    """What a step adds to the surprisal test of its run: of μ or of π, whichever strays less from the entropy.

    Trainers log the entropy of π, which a lag moves away from that of μ in the same direction at every step.
    """
    sums = SurprisalSums.of(evidence)
    excess, of_target = sums.surprisal - sums.entropy, _target_excess(evidence) * sums.entropy
    return replace(sums, surprisal=sums.entropy + of_target) if abs(of_target) < abs(excess) else sums


def _target_excess(evidence: LintEvidence) -> float:
    """Σ(−ρ·log π − H) / Σ H: near 0 where the entropies are those of π and μ sampled; NaN where not known."""
    entropy = evidence.sum("target_entropy")
    return evidence.sum("target_surprisal") / entropy - 1.0 if entropy > 0 else math.nan


def _entropy_of_trainer(evidence: LintEvidence, sums: SurprisalSums) -> Finding | None:
    """−log μ strays from the entropy, and −log π, weighted to be of π, does not."""
    share, of_target = sums.surprisal / sums.entropy - 1.0, _target_excess(evidence)
    if not abs(of_target) <= _SHARE_OF_TARGET * abs(share):
        return None
    seen = (
        f"−log μ averages {number(sums.surprisal / sums.tokens)} nats where the entropy averages "
        f"{number(sums.entropy / sums.tokens)} ({_signed_percent(share)}); −log π weighted by ρ is only "
        f"{_signed_percent(of_target)} off it."
    )
    numbers = {"share_of_mu": share, "share_of_pi": of_target, "tokens": sums.tokens}
    return Finding("entropy_of_trainer", "look", seen, numbers)


def _entropy_not_checked(evidence: LintEvidence, unreliable: str) -> Clean | NotChecked:
    check = "entropy_of_trainer"
    if not evidence.sum("target_entropy") > 0:
        return NotChecked(check, "needs both log-probs and entropy")
    return NotChecked(check, unreliable) if unreliable else Clean(check)


def _signed_percent(share: float) -> str:
    return f"{'+' if share > 0 else '−'}{number(100.0 * abs(share))} %"


def surprisal_outcome(sums: SurprisalSums) -> Finding | Clean | NotChecked:
    """The surprisal test alone."""
    if not sums.tokens:
        return NotChecked(_CHECK, "the surprisal test needs rollout_log_probs and entropy")
    if sums.clusters < LEAST_GROUPS:
        return NotChecked(_CHECK, f"the surprisal test needs {LEAST_GROUPS} {sums.unit}, and there are {sums.clusters}")
    needed = math.sqrt(-2.0 * math.log(FALSE_ALARM))
    if not sums.variance > 0 or _WANTED_SHARE * sums.entropy < needed * math.sqrt(sums.variance):
        return NotChecked(
            _CHECK,
            f"the surprisal test needs more tokens: {sums.tokens:,} with {number(sums.entropy)} nats of entropy do not "
            "suffice",
        )
    excess = sums.surprisal - sums.entropy
    agrees = math.isnan(sums.t) or abs(sums.t) >= student_t_quantile(1 - _CLUSTERED_CHANCE / 2, sums.clusters - 1)
    if abs(excess) < _LEAST_SHARE * sums.entropy or sums.log_chance() > math.log(FALSE_ALARM) or not agrees:
        return Clean(_CHECK)
    ratio = sums.surprisal / sums.entropy
    base = [f" (or {words})" for words, factor in _BASES.items() if abs(ratio / factor - 1.0) <= _BASE_NEAR]
    why = (
        "tokens are likelier than their law makes them: truncation, or a temperature below 1"
        if excess < 0
        else "tokens are less likely than their law makes them: a temperature above 1, or the entropy of another law"
    )
    seen = (
        f"−log μ averages {number(sums.surprisal / sums.tokens)} nats over {sums.tokens:,} tokens where the entropy "
        f"averages {number(sums.entropy / sums.tokens)} "
        f"({_signed_percent(excess / sums.entropy)}); "
        f"surprisal_z {number(sums.z)} over {sums.clusters:,} {sums.unit}; {why}{''.join(base)}."
    )
    return Finding(_CHECK, "bad", seen, sums.numbers())


def _variance(evidence: LintEvidence) -> float:
    """What stands for the variance of Σ −log μ: see `surprisal.py`."""
    of_broad = evidence.sum("broad_bound")
    if evidence.count("broad_tokens") >= _LEAST_BROAD_TOKENS:
        of_broad = max(evidence.sum("broad_squares"), _LEAST_PART_OF_BOUND * of_broad)
    return max(evidence.sum("sharp_bound"), 0.0) + of_broad


def _also(tested: Outcome) -> str:
    if isinstance(tested, Finding):
        return f"; {tested.seen.rstrip('.')}"
    return "; the surprisal test does not see it" if isinstance(tested, Clean) else ""


def _parameters(evidence: LintEvidence) -> str:
    """The sampling parameters other than the plain ones, as declared."""
    parts = []
    low, high = -evidence.extreme("minus_min_temperature"), evidence.extreme("max_temperature")
    if evidence.count("declared_tempered"):
        parts.append(f"temperature {number(low)}" + (f" to {number(high)}" if high > low else ""))
    top_p, top_k = -evidence.extreme("minus_min_top_p"), -evidence.extreme("minus_min_top_k")
    if top_p < 1:
        parts.append(f"top-p {number(top_p)}")
    if math.isfinite(top_k) and top_k > 0:
        parts.append(f"top-k {number(top_k)}")
    if evidence.extreme("max_min_p") > 0:
        parts.append(f"min-p {number(evidence.extreme('max_min_p'))}")
    return ", ".join(parts) or "shaped sampling"
