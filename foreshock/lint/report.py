"""The report of the lint: the outcome of each check, warnings with their evidence."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from foreshock.api.steps import CheckRecord, CheckState, LintExampleRecord, LintWarningRecord
from foreshock.lint.checks import CHECKS
from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.checks.values import SIGNS, columns_without_log_probs
from foreshock.lint.evidence import LintEvidence
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome
from foreshock.model_kind import ModelKind
from foreshock.severity import severity_rank


@dataclass(frozen=True, slots=True)
class LintReport:
    """All checks over `rollouts` rollouts and `tokens` model-generated tokens; critical warnings first."""

    rollouts: int
    tokens: int
    warnings: tuple[LintWarningRecord, ...] = ()
    checks: tuple[CheckRecord, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        """True if no check found more than an info; checks that could not be made are in `not_checked`."""
        return all(warning.severity == "info" for warning in self.warnings)

    @property
    def not_checked(self) -> tuple[CheckRecord, ...]:
        """The checks that could not be made, with the reasons."""
        return tuple(check for check in self.checks if check.state == "not checked")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; the token of a whole rollout is −1."""
        found = asdict(self)
        for place in (place for warning in found["warnings"] for place in warning["where"]):
            place["token"] = -1 if place["token"] is None else place["token"]
        return found


@np.errstate(all="ignore")
def run_checks(
    evidence: LintEvidence, *, entropy: float | None = None, model_kind: ModelKind | None = None
) -> LintReport:
    """Return the report over all rollouts of the evidence, in the order of the catalogue, critical warnings first.

    `entropy` and `model_kind` are those of `Judging`.
    """
    judging = Judging(CHECKS, evidence, entropy, model_kind)
    invalid = columns_without_log_probs(evidence)
    why = f"the {' and the '.join(invalid)} column holds no log-probs" if invalid else ""
    found = [
        outcome_records(
            check,
            NotChecked(why) if why and check not in SIGNS else judging.outcome(check.name),
            evidence.where(check.name),
        )
        for check in CHECKS.values()
    ]
    warnings = [warning for warning, _ in found if warning is not None]
    warnings.sort(key=lambda warning: severity_rank(warning.severity))
    rollouts = evidence[Rollouts]
    return LintReport(rollouts.rollouts, rollouts.tokens, tuple(warnings), tuple(result for _, result in found))


def outcome_records(
    check: Check, outcome: Outcome, where: Iterable[LintExampleRecord] = ()
) -> tuple[LintWarningRecord | None, CheckRecord]:
    """Return the records to show for an outcome: a warning if it is a finding, and the result of its check.

    `where` holds the examples for a finding without examples of its own.
    """
    if not isinstance(outcome, Finding):
        state: CheckState = "clean" if isinstance(outcome, Clean) else "not checked"
        return None, CheckRecord(name=check.name, title=check.title, state=state, why=outcome.why)
    warning = LintWarningRecord(
        name=check.name,
        severity=outcome.severity,
        title=outcome.title or check.title,
        seen=outcome.seen,
        evidence={key: float(value) for key, value in outcome.evidence.items() if math.isfinite(value)},
        where=tuple(where if outcome.where is None else outcome.where),
        effect=check.effect,
        remedy=outcome.remedy or check.remedy,
    )
    return warning, CheckRecord(name=check.name, title=check.title, state="warned", why="")
