"""The outcomes of a check (Finding, Clean, NotChecked), and the report that they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from foreshock.lint.catalogue import CHECKS
from foreshock.lint.evidence.lint_evidence import LintEvidence
from foreshock.lint.report import CheckResult, Example, LintReport, LintWarning, Severity
from foreshock.severity import severity_rank

__all__ = ["FALSE_ALARM", "LEAST_GROUPS", "Clean", "Finding", "NotChecked", "Outcome", "build_report"]

# The chance of a false alarm of one statistical check at a healthy step. Four checks over 1000 steps: 0.4 %.
FALSE_ALARM = 1e-6
# With fewer groups Student's t has no power at such small chances.
LEAST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """The check found a problem: `seen` in one sentence with its numbers, `evidence` by name."""

    check: str
    severity: Severity
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    where: tuple[Example, ...] | None = None  # None: the examples under the check's own name


@dataclass(frozen=True, slots=True)
class Clean:
    """The check found nothing; `why` gives the basis if that is not the data."""

    check: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """The check could not be made, because of `why`."""

    check: str
    why: str


Outcome = Finding | Clean | NotChecked


def build_report(evidence: LintEvidence, outcomes: Iterable[Outcome]) -> LintReport:
    """Return the report of the outcomes, one for each check, in the order of the catalogue, critical warnings first."""
    by_name = {outcome.check: outcome for outcome in outcomes}
    findings = [found for name in CHECKS if isinstance(found := by_name[name], Finding)]
    ordered = sorted(findings, key=lambda each: severity_rank(each.severity))
    return LintReport(
        rollouts=evidence.count("rollouts"),
        tokens=evidence.count("tokens"),
        warnings=tuple(_warning(evidence, finding) for finding in ordered),
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
