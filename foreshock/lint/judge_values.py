"""Judge single values: signs, finiteness, rounding."""

from __future__ import annotations

from foreshock.lint.evidence import LintEvidence
from foreshock.lint.findings import Clean, Finding, NotChecked, Outcome, number, percent
from foreshock.lint.tally import COLUMNS

__all__ = ["judge_finite", "judge_rounding", "judge_signs", "unreadable_columns"]

_SIGNS = ("probabilities_as_log_probs", "negated_log_probs", "positive_log_probs")
_LEAST_ROUNDING_SEEN = 50
# A part of a column: far above what chance makes among values that are not small.
_LEAST_PARTLY, _PARTLY = 20, 0.1
_ALL = 0.999
_LEAST_SOME = 10
_SOME = "; none of them is above 1: some rollouts may hold probabilities"
_NAMES = {"rollout": "rollout_log_probs", "trainer": "trainer_log_probs"}


def unreadable_columns(evidence: LintEvidence) -> list[str]:
    """The columns whose values are no log-probs at all: probabilities, or log-probs of the wrong sign."""
    return [_NAMES[name] for name in COLUMNS if _kind(evidence, name) in _SIGNS[:2]]


def judge_signs(evidence: LintEvidence) -> list[Outcome]:
    """Probabilities, negated log-probs, and single values above 0."""
    if not any(evidence.count(f"{name}_logged") for name in COLUMNS):
        return [NotChecked(check, "no log-probs were logged") for check in _SIGNS]
    found: dict[str, list[str]] = {check: [] for check in _SIGNS}
    numbers: dict[str, dict[str, float]] = {check: {} for check in _SIGNS}
    for name in COLUMNS:
        kind = _kind(evidence, name)
        if kind is None:
            continue
        positive, logged = evidence.count(f"{name}_positive"), evidence.count(f"{name}_logged")
        least, most = -evidence.extreme(f"{name}_minus_min"), evidence.extreme(f"{name}_max")
        found[kind].append(
            f"{positive:,} of {logged:,} values of {_NAMES[name]} ({percent(positive, logged)}) are above 0; "
            f"they range from {number(least)} to {number(most)}"
            f"{_SOME if kind == 'positive_log_probs' and positive >= _LEAST_SOME and most <= 1.0 else ''}"
        )
        numbers[kind] |= {f"{name}_positive": positive, f"{name}_min": least, f"{name}_max": most}
    where = evidence.where("positive_log_probs")
    return [
        Finding(check, "bad", "; ".join(found[check]) + ".", numbers[check], where) if found[check] else Clean(check)
        for check in _SIGNS
    ]


def judge_finite(evidence: LintEvidence) -> Outcome:
    """NaN and infinite values at generated tokens."""
    check = "non_finite_log_probs"
    if not any(evidence.count(f"{name}_logged") for name in COLUMNS):
        return NotChecked(check, "no log-probs were logged")
    kinds = {"nan": "NaN", "minus_inf": "−inf", "plus_inf": "+inf"}
    numbers = {f"{name}_{kind}": float(evidence.count(f"{name}_{kind}")) for name in COLUMNS for kind in kinds}
    if not any(numbers.values()):
        return Clean(check)
    parts = []
    for name in COLUMNS:
        told = [f"{int(n):,} {word}" for kind, word in kinds.items() if (n := numbers[f"{name}_{kind}"])]
        if told:
            where = _ends(evidence, name, int(sum(numbers[f"{name}_{kind}"] for kind in kinds)))
            parts.append(f"{_NAMES[name]}: {', '.join(told)} of {evidence.count(f'{name}_logged'):,}{where}")
    return Finding(check, "look", "; ".join(parts) + ".", {name: value for name, value in numbers.items() if value})


def _ends(evidence: LintEvidence, name: str, lost: int) -> str:
    """Words for values that are all lost at one end of the responses."""
    for end in ("first", "last"):
        if lost > 1 and evidence.count(f"{name}_lost_{end}") == lost < evidence.count(f"{name}_logged") / 2:
            return f", each at the {end} token of its response"
    return ""


def judge_rounding(evidence: LintEvidence) -> Outcome:
    """Columns of which every value fits into bfloat16 or float16."""
    check = "rounded_log_probs"
    parts: list[str] = []
    numbers: dict[str, float] = {}
    enough = False
    for name in COLUMNS:
        seen = evidence.count(f"{name}_rounding_seen")
        if seen < _LEAST_ROUNDING_SEEN or evidence.extreme(f"{name}_max") == -evidence.extreme(f"{name}_minus_min"):
            continue
        enough = True
        kind = _kind_of_rounding(evidence, name)
        if kind is None:
            continue
        fitting, large = evidence.count(f"{name}_as_{kind}"), evidence.count(f"{name}_large_seen")
        if fitting >= _ALL * seen:
            # An error even over the last place has a variance of 1/12, and k3 is half the square of d.
            floor = evidence.sum(f"{name}_{kind}_variance") / seen / 24.0
            parts.append(
                f"{fitting:,} of the {seen:,} values of {_NAMES[name]} that were looked at fit into {kind}; "
                f"that rounding alone makes a k3 of about {number(floor)} at these tokens"
            )
            numbers |= {f"{name}_as_{kind}": float(fitting), f"{name}_seen": float(seen), f"{name}_k3_floor": floor}
        else:
            fitting = evidence.count(f"{name}_large_as_{kind}")
            parts.append(
                f"{fitting:,} of the {large:,} values of {_NAMES[name]} below −0.5 that were looked at fit into "
                f"{kind}, and the others do not: a part of the rollouts was rounded"
            )
            numbers |= {f"{name}_as_{kind}": float(fitting), f"{name}_seen": float(large)}
    if parts:
        return Finding(check, "look", "; ".join(parts) + ".", numbers)
    return Clean(check) if enough else NotChecked(check, f"fewer than {_LEAST_ROUNDING_SEEN} uncertain tokens")


def _kind_of_rounding(evidence: LintEvidence, name: str) -> str | None:
    """The type that a column, or a good part of its values that are not small, fits into."""
    seen, large = evidence.count(f"{name}_rounding_seen"), evidence.count(f"{name}_large_seen")
    for kind in ("bfloat16", "float16"):
        # bfloat16 first: in the range of log-probs what fits into it nearly always fits into float16 too.
        if evidence.count(f"{name}_as_{kind}") >= _ALL * seen:
            return kind
    halves, brains = (evidence.count(f"{name}_large_as_{kind}") for kind in ("float16", "bfloat16"))
    if halves < max(_LEAST_PARTLY, _PARTLY * large):
        return None
    return "bfloat16" if brains > halves / 2 else "float16"


def _kind(evidence: LintEvidence, name: str) -> str | None:
    """What the values of a column above 0 are; None where there are none."""
    positive, logged = evidence.count(f"{name}_positive"), evidence.count(f"{name}_logged")
    if not positive:
        return None
    if positive < 0.5 * logged or evidence.count(f"{name}_negative"):
        return "positive_log_probs"
    return "negated_log_probs" if evidence.count(f"{name}_above_one") else "probabilities_as_log_probs"
