"""Judge whether the logged μ is the law that sampled: by what is declared, and by the surprisal test."""

from __future__ import annotations

import math

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import FALSE_ALARM, Clean, Finding, NotChecked, Outcome, number
from foreshock.lint.judge_pairs import LEAST_GROUPS
from foreshock.measures.intervals import student_t_quantile

__all__ = ["judge_surprisal"]

_CHECK = "raw_log_probs"
# Below this share of the entropy the difference may be that between μ and a π whose entropy was logged.
_LEAST_SHARE = 0.02
# The clustered test has only to agree: the bound that does not trust the sample's own variance carries the weight.
_CLUSTERED_CHANCE = 0.01
# A sample that would not show a fifth too little surprisal (top-p 0.9) has not been tested.
_WANTED_SHARE = 0.2
_LARGEST_SURPRISAL = 12.0


def judge_surprisal(evidence: LintEvidence) -> Outcome:
    """Raw log-probs under temperature or truncation."""
    tested = _test(evidence)
    numbers = _numbers(evidence)
    if declared := evidence.count("raw_and_shaped"):
        seen = (
            f"{declared:,} of {evidence.count('rollouts'):,} rollouts were sampled with {_parameters(evidence)}, and "
            f"the engine logs raw_logprobs, before these are applied{_also(tested)}."
        )
        return Finding(_CHECK, "bad", seen, numbers)
    if isinstance(tested, Finding):
        return tested
    if evidence.count("shaped_mode_unknown") and not isinstance(tested, Clean):
        why = f"sampled with {_parameters(evidence)}, and logprobs_mode is not said; {tested.why}"
        return NotChecked(_CHECK, why)
    plain = evidence.count("sampling_unknown") == 0 and evidence.count("declared_shaped") == 0
    if isinstance(tested, NotChecked) and (plain or evidence.count("mode_processed") == evidence.count("rollouts")):
        return Clean(_CHECK, f"by what is declared of sampling; the surprisal test was not made: {tested.why}")
    return tested


def _test(evidence: LintEvidence) -> Finding | Clean | NotChecked:
    tokens, groups = evidence.count("surprisal_tokens"), evidence.groups.count
    if not tokens:
        return NotChecked(_CHECK, "the surprisal test needs rollout_log_probs and entropy")
    if groups < LEAST_GROUPS:
        return NotChecked(_CHECK, f"the surprisal test needs {LEAST_GROUPS} prompt groups, and there are {groups}")
    surprisal, entropy = evidence.sum("surprisal"), evidence.sum("entropy")
    variance = evidence.sum("surprisal_variance")
    needed = math.sqrt(-2.0 * math.log(FALSE_ALARM))
    if not variance > 0 or _WANTED_SHARE * entropy < needed * math.sqrt(variance):
        why = f"the surprisal test needs more tokens: {tokens:,} with {number(entropy)} nats of entropy do not suffice"
        return NotChecked(_CHECK, why)
    excess = surprisal - entropy
    t = evidence.groups.t_of_zero("surprisal")
    agrees = math.isnan(t) or abs(t) >= student_t_quantile(1 - _CLUSTERED_CHANCE / 2, groups - 1)
    if abs(excess) < _LEAST_SHARE * entropy or _log_chance(evidence, excess) > math.log(FALSE_ALARM) or not agrees:
        return Clean(_CHECK)
    why = (
        "tokens are likelier than their law makes them: truncation, or a temperature below 1"
        if excess < 0
        else "tokens are less likely than their law makes them: a temperature above 1, or the entropy of another law"
    )
    z = evidence.groups.z_of_zero("surprisal")
    seen = (
        f"−log μ averages {number(surprisal / tokens)} nats over {tokens:,} tokens where the entropy averages "
        f"{number(entropy / tokens)} ({'+' if excess > 0 else '−'}{number(100 * abs(excess) / entropy)} %); "
        f"surprisal_z {number(z)} over {groups:,} prompt groups; {why}."
    )
    return Finding(_CHECK, "bad", seen, _numbers(evidence))


def _log_chance(evidence: LintEvidence, excess: float) -> float:
    """An upper bound of the log of the chance of so much excess in a healthy run.

    Below 0 as `surprisal.py` says, above it Bernstein's inequality with the largest surprisal seen.
    """
    variance = evidence.sum("surprisal_variance")
    if excess > 0:
        variance += max(_LARGEST_SURPRISAL, evidence.extreme("largest_surprisal")) * excess / 3.0
    return -excess * excess / (2.0 * variance)


def _numbers(evidence: LintEvidence) -> dict[str, float]:
    tokens = evidence.count("surprisal_tokens")
    if not tokens:
        return {}
    return {
        "tokens": tokens,
        "mean_surprisal": evidence.sum("surprisal") / tokens,
        "mean_entropy": evidence.sum("entropy") / tokens,
        "surprisal_z": evidence.groups.z_of_zero("surprisal"),
        "groups": evidence.groups.count,
    }


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
