"""Judge checks: each from the evidence and, if it depends on them, from the outcomes of others.

A healthy run of a thousand steps should give no warning. Checks for a pattern that sampling cannot produce (a copied
column, one dropped id, a rounded type) have a negligible chance of a false alarm. The five that test a number
(surprisal, mean ratio, shift, duplicates, tokens not sampled) have a chance of FALSE_ALARM per step, and also require a
minimum effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from foreshock.api.steps import LintExampleRecord
from foreshock.healthy_ranges import required_range
from foreshock.lint.counting import Counts
from foreshock.lint.evidence import LintEvidence
from foreshock.model_kind import ModelKind
from foreshock.severity import Severity

_Kind = TypeVar("_Kind", bound=Counts)

# The chance of a false alarm of one statistical check at a healthy step. Five checks over 1000 steps: 0.5 %.
FALSE_ALARM = 1e-6
# With fewer groups Student's t has no power at such small chances.
LEAST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """The check found a problem: `seen` in one sentence with its numbers, `evidence` by name.

    `title` replaces the title of the check if the finding names the affected part of the data, `remedy` its remedy.
    """

    severity: Severity
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    where: tuple[LintExampleRecord, ...] | None = None  # None: the examples under the check's own name
    title: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Clean:
    """The check found nothing; `why` gives the reason if it is not the data."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """The check could not be made, because of `why`."""

    why: str


Outcome = Finding | Clean | NotChecked


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `title` names the problem that it finds; `docs/lint.md` describes how it is found.

    `unless` returns why other findings rule the check out, or an empty string. A finding is dropped if one of
    `yields_to`, which are more specific, explains the same data.
    """

    name: str
    title: str
    effect: str
    remedy: str
    judge: Callable[[Judging], Outcome]
    unless: Callable[[Judging], str] = lambda judging: ""
    yields_to: tuple[str, ...] = ()
    # False: the data do not prove it; other causes look the same.
    proven: bool = True
    # False: it names nothing that makes π and μ differ, so that it is never the cause of a mismatch.
    explains: bool = True
    # True: it is about a column beside the log-probs, so that no headline names it.
    auxiliary: bool = False
    # True: single steps are often so by chance, so that the diagnosis tells it only of nearly all steps.
    lasting: bool = False

    @property
    def title_of_part(self) -> str:
        """The title of a finding that concerns only some of the rollouts."""
        return f"{self.title} in a part of the rollouts"


class Judging:
    """The evidence that is judged, and the outcome of each check, made when it is first asked for.

    `entropy` is the trainer's mean entropy in nats, used if the rollouts have none per token. `model_kind` chooses the
    healthy ranges; None takes the wider ones of mixtures of experts.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        evidence: LintEvidence,
        entropy: float | None = None,
        model_kind: ModelKind | None = None,
    ) -> None:
        self.evidence = evidence
        self.entropy = entropy
        self.model_kind: ModelKind = model_kind or "moe"
        self._checks = checks
        self._outcomes: dict[str, Outcome] = {}

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        """Return the counts of a kind."""
        return self.evidence[kind]

    @property
    def healthy_k3(self) -> float:
        """The largest k3 that is healthy."""
        healthy = required_range("k3_kl", self.model_kind).warning
        assert healthy is not None
        return healthy

    def found(self, name: str) -> bool:
        """Return True if a check has a finding."""
        return isinstance(self.outcome(name), Finding)

    def outcome(self, name: str) -> Outcome:
        """Return the outcome of a check."""
        if name not in self._outcomes:
            self._outcomes[name] = self._judge(self._checks[name])
        return self._outcomes[name]

    def _judge(self, check: Check) -> Outcome:
        if why := check.unless(self):
            return NotChecked(why)
        outcome = check.judge(self)
        explained_by = next((each for each in check.yields_to if isinstance(outcome, Finding) and self.found(each)), "")
        return NotChecked(f"explained by {explained_by}") if explained_by else outcome


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
