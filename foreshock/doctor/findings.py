"""What the doctor says: findings, with what was ruled out and what could not be tried."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.api.records import to_json
from foreshock.diagnosis.wording import interval_of_share, number, percent, plural

__all__ = ["DoctorReport", "Finding", "SideReport"]

SIDE_WORDS = {"rollout": "the engine's logged log-probs (μ)", "trainer": "the trainer's logged log-probs (π)"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of a side, or that none is known.

    `kind`: "cause"; "expected" (ordinary rounding, a declared lag); "unknown". `cause` is a row of the catalogue,
    `value` its value. `share` of E[d²] of the side against its undisturbed replay is explained, with the 95 % interval
    over prompts. `before`, `after`: E[d²]/2 in nats², which is k3 if small. `exact`: reproduced to within the noise of
    other batches; else to within ordinary rounding. `alternatives` reproduce it as well.
    """

    kind: str
    side: str
    cause: str
    value: str
    sentence: str
    tokens: int
    rollouts: int
    sample_ids: tuple[str, ...] = ()
    share: float = math.nan
    share_low: float = math.nan
    share_high: float = math.nan
    before: float = math.nan
    after: float = math.nan
    exact: bool = False
    alternatives: tuple[str, ...] = ()
    fixes: Mapping[str, str] = field(default_factory=dict)
    confirm: str = ""


@dataclass(frozen=True, slots=True)
class SideReport:
    """How a side was explained: the precision of its replay, what it left before and after, and the two floors.

    `noise`: the same replay in other batches. `rounding`: replays in other precisions; both are E[d²]/2 in nats².
    """

    side: str
    precision: str
    before: float
    after: float
    noise: float
    rounding: float


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings of one batch, gravest first; `ruled_out`: variants and the share each explains; `not_tried`: why."""

    rollouts: int
    tokens: int
    findings: tuple[Finding, ...]
    sides: tuple[SideReport, ...]
    ruled_out: tuple[tuple[str, float], ...]
    not_tried: tuple[tuple[str, str], ...]
    replays: int
    seconds: float
    ended: str

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The findings that name a cause."""
        return tuple(each for each in self.findings if each.kind == "cause")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return to_json(self)

    def lines(self) -> list[str]:
        """Return the report as text."""
        found = [f"{plural(self.rollouts, 'rollout')}, {plural(self.tokens, 'token')}; {self.ended}."]
        for finding in self.findings:
            found += ["", f"{finding.kind}: {finding.sentence}", *_details(finding)]
        found += ["", *(_on_side(side) for side in self.sides)]
        if self.ruled_out:
            best = ", ".join(f"{label} ({percent(share)})" for label, share in self.ruled_out[:6])
            found.append(f"ruled out: {plural(len(self.ruled_out), 'variant')}; those that explain most: {best}.")
        found += [f"not tried: {what}: {why}" for what, why in self.not_tried]
        found.append(f"price: {plural(self.replays, 'replay')}, {self.seconds:.1f} s.")
        return found


def _details(finding: Finding) -> list[str]:
    found = []
    if not math.isnan(finding.share):
        interval = interval_of_share(finding.share_low, finding.share_high)
        how = "as exactly as other batches" if finding.exact else "within ordinary rounding"
        found.append(
            f"  explains {100 * finding.share:.1f} % ({interval}): E[d²]/2 {number(finding.before)} before, "
            f"{number(finding.after)} after, {how}"
        )
    if finding.alternatives:
        found.append(f"  cannot be told from: {'; '.join(finding.alternatives)}")
    found += [f"  fix ({framework}): {fix}" for framework, fix in finding.fixes.items()]
    return found + ([f"  confirm: {finding.confirm}"] if finding.confirm else [])


def _on_side(side: SideReport) -> str:
    return (
        f"{SIDE_WORDS[side.side]} against a {side.precision} replay: E[d²]/2 {number(side.before)}, "
        f"{number(side.after)} after the findings; noise of other batches {number(side.noise)}, "
        f"ordinary rounding {number(side.rounding)}."
    )
