"""A run's risk of a collapse: an ordinal level with its reasons, from the alerts that stand.

Alerts of one family (lengths, mismatch, gradient, reward) have one cause, so the level counts families: a second one
corroborates the first. The level is an order and no probability: as long as fewer than `COLLAPSES_FOR_PROBABILITY`
collapses are measured, a share of them has an interval too wide to act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.reward import LONGEST_LEAD
from foreshock.severity import Severity, severity_rank

RiskLevel = Literal["calm", "watch", "elevated", "high", "critical"]

LEVELS: Final[tuple[RiskLevel, ...]] = ("calm", "watch", "elevated", "high", "critical")
"""Lowest first; the place is the number that is exported."""

COLLAPSES_FOR_PROBABILITY = 30
"""With 30 collapses the 95 % interval of a share is at most ±19 points wide."""

NO_PROBABILITY = (
    f"The level is an order, not a probability: fewer than {COLLAPSES_FOR_PROBABILITY} collapses of large models have "
    "been measured."
)

Family = Literal["lengths", "mismatch", "gradient", "reward", "entropy", "other"]

_FAMILIES: Mapping[str, Family] = {
    "length": "lengths",
    "gradient": "gradient",
    "reward": "reward",
    "entropy": "entropy",
}
"""First word of a rule's name → family, for rules that are not of the mismatch."""

_OF_MISMATCH = frozenset(rule.name for rule in default_rules() if rule.cause == "mismatch")

_NO_SIGNS: frozenset[str] = frozenset({"scores_identical"})
"""Rules that tell of the log, not of the run."""


@dataclass(frozen=True, slots=True)
class StandingAlert:
    """An alert that has not cleared."""

    rule: str
    severity: Severity
    step: int


@dataclass(frozen=True, slots=True)
class Risk:
    """The level, its place in `LEVELS`, and a sentence for each thing that it rests on."""

    level: RiskLevel
    reasons: tuple[str, ...]

    @property
    def score(self) -> int:
        """The place of the level, 0 for "calm"."""
        return LEVELS.index(self.level)


def assess(alerts: Sequence[StandingAlert], observed_step: int | None) -> Risk:
    """Return the risk of a run whose newest closed step is ``observed_step``.

    | level | alerts that stand |
    | --- | --- |
    | calm | none |
    | watch | information only |
    | elevated | warnings of one family |
    | high | a critical one, or warnings of two families |
    | critical | a critical one and at least a warning of another family |
    """
    if observed_step is None:
        return Risk("calm", ("No step has closed yet.",))
    standing = [each for each in alerts if each.rule not in _NO_SIGNS and _counts(each, observed_step)]
    if not standing:
        return Risk("calm", ("No alert stands.",))
    worst: dict[Family, StandingAlert] = {}
    for alert in sorted(standing, key=lambda each: (severity_rank(each.severity), each.step, each.rule)):
        worst.setdefault(family_of(alert.rule), alert)
    critical = sum(alert.severity == "critical" for alert in worst.values())
    warned = sum(alert.severity in ("warning", "critical") for alert in worst.values())
    level: RiskLevel = "watch"
    if critical and warned >= 2:
        level = "critical"
    elif critical or warned >= 2:
        level = "high"
    elif warned:
        level = "elevated"
    reasons = [
        f"{family.capitalize()}: {alert.rule} ({alert.severity}) since step {alert.step}."
        for family, alert in worst.items()
    ]
    if critical + warned and len(worst) == 1:
        reasons.append("No signal of another family corroborates it.")
    return Risk(level, tuple(reasons))


def family_of(rule: str) -> Family:
    """Return the family of a rule."""
    if rule in _OF_MISMATCH:
        return "mismatch"
    return _FAMILIES.get(rule.partition("_")[0], "other")


def _counts(alert: StandingAlert, observed_step: int) -> bool:
    """Return whether an alert still tells of the future: length alerts have no end of their own."""
    if family_of(alert.rule) != "lengths" or alert.rule == "length_fall":
        return True
    return observed_step - alert.step <= LONGEST_LEAD
