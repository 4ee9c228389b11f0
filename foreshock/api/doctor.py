"""The doctor's report on a batch: its findings, trials that are not named, what could not be tried, and the cost."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from foreshock.api.records import NAN, Measured, Record

FindingKind = Literal["cause", "expected", "unknown"]


class Finding(Record, kw_only=False):
    """One cause of a side, or that none is known.

    `kind`: "cause"; "expected" (ordinary rounding, a declared lag); "unknown". `cause` is a row of the catalogue,
    `value` its value. `share` of E[d²] of the side against its undisturbed replay is explained, with its range over the
    prompts. `before`, `after`: E[d²]/2 in nats², which is k3 if small. `exact`: reproduced to within the noise of
    other batches; else to within ordinary rounding. `alternatives` reproduce it as well. `fixes`: what to set, by
    framework.
    """

    kind: FindingKind
    side: str
    cause: str
    value: str
    sentence: str
    tokens: int
    rollouts: int
    sample_ids: tuple[str, ...] = ()
    share: Measured = NAN
    share_low: Measured = NAN
    share_high: Measured = NAN
    before: Measured = NAN
    after: Measured = NAN
    exact: bool = False
    alternatives: tuple[str, ...] = ()
    fixes: Mapping[str, str] = field(default_factory=dict)
    confirm: str = ""


class SideReport(Record, kw_only=False):
    """How a side was explained: the precision of its replay, what it left before and after, and the two floors.

    `noise`: the same replay in other batches. `rounding`: replays in other precisions; both are E[d²]/2 in nats².
    """

    side: str
    precision: str
    before: Measured
    after: Measured
    noise: Measured
    rounding: Measured


class RuledOut(Record, kw_only=False):
    """A variant that was tried and not named, as it does not reproduce a side alone, and the share of E[d²] that it
    explains. It may be the cause all the same, beside another one."""

    variant: str
    share: Measured


class NotTried(Record, kw_only=False):
    """What could not be tried, and why. `variant` ends with its side, such as "[rollout]", if it was not left out for
    both."""

    variant: str
    why: str


class DoctorReport(Record, kw_only=False):
    """All findings of one batch, gravest first.

    `ruled_out`: variants that were tried and are no cause, those that explain most first. Variants end with the side
    that they were tried for, such as "[rollout]".
    """

    rollouts: int
    tokens: int
    findings: tuple[Finding, ...]
    sides: tuple[SideReport, ...]
    ruled_out: tuple[RuledOut, ...]
    not_tried: tuple[NotTried, ...]
    replays: int
    seconds: float
    ended: str

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The findings that name a cause."""
        return tuple(each for each in self.findings if each.kind == "cause")


class DoctorStepRecord(Record):
    """The newest report of the doctor on a step."""

    run: str
    attempt: int
    step: int
    probe: Annotated[str, "the probe that made it"]
    from_sample: Annotated[bool, "a part of the step's rollouts"]
    published_at_us: int
    report: DoctorReport
    checksums: Annotated[tuple[str, ...], "what the notary found each engine to hold after the step's weight sync"] = ()
