"""The report of the lint: warnings with their evidence, and the state of every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["CheckResult", "CheckState", "Example", "LintReport", "LintWarning", "Severity"]

Severity = Literal["critical", "warning"]
CheckState = Literal["clean", "warned", "not checked"]


@dataclass(frozen=True, slots=True, order=True)
class Example:
    """One place of a warning: a rollout, optionally a token (counted from 0), and the values there."""

    sample_id: str
    token: int = -1  # −1: the rollout as a whole
    text: str = ""

    def __str__(self) -> str:
        place = f"{self.sample_id}, token {self.token}" if self.token >= 0 else self.sample_id
        return f"{place}: {self.text}" if self.text else place


@dataclass(frozen=True, slots=True)
class LintWarning:
    """A named warning. `critical`: measures of this data are wrong; `warning`: they may mislead.

    `seen` is one sentence with the numbers, `evidence` the finite numbers by name, `where` up to three examples,
    `effect` the consequence for the measures, `remedy` what to do.
    """

    name: str
    severity: Severity
    title: str
    seen: str
    evidence: Mapping[str, float]
    where: tuple[Example, ...]
    effect: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: `clean`, `warned` (see the warning of its name), or `not checked` because of `why`."""

    name: str
    title: str
    state: CheckState
    why: str = ""


@dataclass(frozen=True, slots=True)
class LintReport:
    """All checks over `rollouts` rollouts and `tokens` model-generated tokens; critical warnings first."""

    rollouts: int
    tokens: int
    warnings: tuple[LintWarning, ...] = ()
    checks: tuple[CheckResult, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        """True if no check found a problem; checks that could not be made are in `not_checked`."""
        return not self.warnings

    @property
    def not_checked(self) -> tuple[CheckResult, ...]:
        """The checks that could not be made, with the reasons."""
        return tuple(check for check in self.checks if check.state == "not checked")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "warnings": [
                {**asdict(warning), "where": [asdict(example) for example in warning.where]}
                for warning in self.warnings
            ],
            "checks": [asdict(check) for check in self.checks],
        }
