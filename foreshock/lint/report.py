"""The report of the lint: the outcome of each check, warnings with their evidence, and how findings show numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from foreshock.severity import Severity

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
    """A named warning. `critical`: measures of this data are wrong; `warning`: they may mislead; `info`: neither.

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
        """True if no check found more than an info; checks that could not be made are in `not_checked`."""
        return all(warning.severity == "info" for warning in self.warnings)

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


def format_number(value: float) -> str:
    """Return three significant digits, plain or scientific, with U+2212 as the minus sign."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not estimable"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


def format_percent(part: float, whole: float) -> str:
    """Return `part` of `whole` as a percentage; 0 % if `whole` is 0."""
    return f"{format_number(100.0 * part / whole)} %" if whole else "0 %"


def format_signed_percent(share: float) -> str:
    """Return a share as a percentage with its sign."""
    return f"{'+' if share > 0 else '−'}{format_number(100.0 * abs(share))} %"
