"""Check if the logged μ is the sampling distribution, by the declared sampling and by the surprisal test."""

from __future__ import annotations

import math

from foreshock.lint.checks.outcomes import Clean, Finding, NotChecked, Outcome
from foreshock.lint.checks.surprisal import SurprisalSums, check_surprisal, target_excess
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.formatting import format_number, format_signed_percent

__all__ = ["check_sampling"]

_CHECK = "raw_log_probs"
# The entropy is that of π if π fits it this much better than μ does.
_SHARE_OF_TARGET = 1.0 / 3.0
# Raw log-probs leave ρ near 1, so that μ and π fit the entropy equally badly. Below this, π fits it much better: then
# the data do not show if the log-probs or the entropy are wrong.
_SHARE_OF_BOTH = 0.75


def check_sampling(evidence: LintEvidence, *, unreliable: str = "", covered: bool = True) -> tuple[Outcome, Outcome]:
    """Check for raw log-probs under temperature or truncation, and for the entropy of π in the place of that of μ.

    `unreliable` is the reason why the surprisal test cannot be made. `covered` is False if mean ρ is known to be off 1.
    """
    sums = SurprisalSums.of(evidence)
    other: Outcome = _entropy_not_checked(evidence, unreliable)
    tested: Finding | Clean | NotChecked = check_surprisal(sums)
    if unreliable:
        tested = NotChecked(_CHECK, unreliable)
    elif isinstance(tested, Finding) and covered:
        if found := _entropy_of_trainer(evidence, sums):
            tested, other = NotChecked(_CHECK, "`entropy` is that of π and not of μ"), found
        elif target_excess(evidence) / (sums.surprisal / sums.entropy - 1.0) < _SHARE_OF_BOTH:
            tested = NotChecked(_CHECK, "`entropy` fits neither μ nor π, which are far apart: log that of μ")
    if declared := evidence.count("raw_and_shaped"):
        seen = (
            f"{declared:,} of {evidence.count('rollouts'):,} rollouts were sampled with {_parameters(evidence)}, and "
            f"the engine logs raw_logprobs, before these are applied{_result_of(tested)}."
        )
        return Finding(_CHECK, "critical", seen, sums.numbers()), other
    if unreliable or not isinstance(tested, NotChecked) or isinstance(other, Finding):
        return tested, other
    if evidence.count("shaped_mode_unknown"):
        why = f"sampled with {_parameters(evidence)}, and logprobs_mode is not declared; {tested.why}"
        return NotChecked(_CHECK, why), other
    plain = evidence.count("sampling_unknown") == 0 and evidence.count("declared_shaped") == 0
    if plain or evidence.count("mode_processed") == evidence.count("rollouts"):
        return Clean(_CHECK, f"by the declared sampling only; {tested.why}"), other
    return tested, other


def _entropy_of_trainer(evidence: LintEvidence, sums: SurprisalSums) -> Finding | None:
    """Return a finding if −log μ differs from the entropy and −log π, weighted by ρ, does not."""
    share, of_target = sums.surprisal / sums.entropy - 1.0, target_excess(evidence)
    if not abs(of_target) <= _SHARE_OF_TARGET * abs(share):
        return None
    seen = (
        f"−log μ averages {format_number(sums.surprisal / sums.tokens)} nats, the entropy "
        f"{format_number(sums.entropy / sums.tokens)} ({format_signed_percent(share)}); −log π weighted by ρ differs "
        f"from the entropy by only {format_signed_percent(of_target)}."
    )
    numbers = {"share_of_mu": share, "share_of_pi": of_target, "tokens": sums.tokens}
    return Finding("entropy_of_trainer", "warning", seen, numbers)


def _entropy_not_checked(evidence: LintEvidence, unreliable: str) -> Clean | NotChecked:
    check = "entropy_of_trainer"
    if not evidence.sum("target_entropy") > 0:
        return NotChecked(check, "needs both log-probs and entropy")
    return NotChecked(check, unreliable) if unreliable else Clean(check)


def _result_of(tested: Outcome) -> str:
    if isinstance(tested, Finding):
        return f"; {tested.seen.rstrip('.')}"
    return "; the surprisal test does not show it" if isinstance(tested, Clean) else ""


def _parameters(evidence: LintEvidence) -> str:
    """Return the declared sampling parameters that differ from plain sampling, such as `temperature 0.7, top-p 0.9`."""
    parts = []
    low, high = -evidence.extreme("minus_min_temperature"), evidence.extreme("max_temperature")
    if evidence.count("declared_tempered"):
        parts.append(f"temperature {format_number(low)}" + (f" to {format_number(high)}" if high > low else ""))
    top_p, top_k = -evidence.extreme("minus_min_top_p"), -evidence.extreme("minus_min_top_k")
    if top_p < 1:
        parts.append(f"top-p {format_number(top_p)}")
    if math.isfinite(top_k) and top_k > 0:
        parts.append(f"top-k {format_number(top_k)}")
    if evidence.extreme("max_min_p") > 0:
        parts.append(f"min-p {format_number(evidence.extreme('max_min_p'))}")
    return ", ".join(parts) or "shaped sampling"
