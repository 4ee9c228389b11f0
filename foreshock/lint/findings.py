"""What judging a check gives: a finding, that it is clean, or that it could not be made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.report import CheckResult, Example, LintReport, LintWarning, Severity

__all__ = ["FALSE_ALARM", "Clean", "Finding", "NotChecked", "Outcome", "assemble", "number", "percent"]

# The chance that a healthy step fires one of the statistical checks. Four of them over 1000 steps: 0.4 %.
FALSE_ALARM = 1e-6


@dataclass(frozen=True, slots=True)
class Finding:
    """The check fires: what was seen, in words and numbers."""

    check: str
    severity: Severity
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    where: tuple[Example, ...] | None = None  # None: the examples under the check's own name


@dataclass(frozen=True, slots=True)
class Clean:
    """Nothing found; `why` says what it rests on where that is not the data."""

    check: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """The check could not be made."""

    check: str
    why: str


Outcome = Finding | Clean | NotChecked


def assemble(evidence: LintEvidence, outcomes: Iterable[Outcome]) -> LintReport:
    """The report of these outcomes, one for each check, in the order of the catalogue; bad warnings first."""
    by_name = {outcome.check: outcome for outcome in outcomes}
    findings = [found for name in CHECKS if isinstance(found := by_name[name], Finding)]
    return LintReport(
        rollouts=evidence.count("rollouts"),
        tokens=evidence.count("tokens"),
        warnings=tuple(_warning(evidence, finding) for finding in sorted(findings, key=lambda each: each.severity)),
        checks=tuple(_result(by_name[name]) for name in CHECKS),
    )


def _warning(evidence: LintEvidence, finding: Finding) -> LintWarning:
    check = CHECKS[finding.check]
    return LintWarning(
        name=check.name,
        severity=finding.severity,
        title=check.title,
        seen=finding.seen,
        evidence={name: value for name, value in finding.evidence.items() if math.isfinite(value)},
        where=evidence.where(check.name) if finding.where is None else finding.where,
        effect=check.effect,
        remedy=check.remedy,
    )


def _result(outcome: Outcome) -> CheckResult:
    title = CHECKS[outcome.check].title
    if isinstance(outcome, Finding):
        return CheckResult(outcome.check, title, "warned")
    return CheckResult(outcome.check, title, "clean" if isinstance(outcome, Clean) else "not checked", outcome.why)


def number(value: float) -> str:
    """Three digits, the shorter of plain and scientific."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not estimable"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


def percent(part: float, whole: float) -> str:
    """A share as a percentage."""
    return f"{number(100.0 * part / whole)} %" if whole else "0 %"
