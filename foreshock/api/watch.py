"""Alerts, advice and rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from foreshock.api.records import Record, parse
from foreshock.json_values import number_or_nan
from foreshock.learning_rate.advice import Advice, Applied, DecisionKind
from foreshock.learning_rate.levers import Correction, Rollback
from foreshock.learning_rate.modes import BESIDE_THE_RATE, Author, BesideTheRate, Lever
from foreshock.model_kind import ModelKind
from foreshock.severity import Severity

AlertState = Literal["open", "acknowledged", "resolved", "retracted"]
STANDING: Final[tuple[AlertState, ...]] = ("open", "acknowledged")
"""States of an alert that has not ended."""


def onset_of(step: int, evidence: Mapping[str, Any]) -> int:
    """Return the step at which an alert began if a detector dated it, else the step at which it fired."""
    return min(int(evidence.get("onset_step", step)), step)


class AlertRecord(Record):
    """A rule that fired: the measured value, the reason, what to do.

    `resolved`: the value is back, or a person resolved it, or a resume superseded its step. `retracted`: with late
    data the rule does not fire.
    """

    id: str
    attempt: int
    rule: str
    step: int
    severity: Severity
    value: float
    threshold: float
    why: str
    what_to_do: str
    moves_learning_rate: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)
    state: AlertState
    cleared_step: Annotated[int | None, "the step at which the rule cleared; null while it fires"] = None
    changed_by: Literal["detector", "operator", "rewind"]
    opened_at_us: int
    changed_at_us: int

    @property
    def onset(self) -> int:
        """The step at which it began; `step` is the one at which it was found."""
        return onset_of(self.step, self.evidence)


class AlertOfRun(AlertRecord):
    """An alert in a list over runs, with its run."""

    run: str
    run_key: str
    project: str


@dataclass(frozen=True, slots=True)
class LeverReport:
    """What a trainer last reported of a lever: the value that it uses (None: as configured), or why it refuses."""

    step: int
    done: Correction | Rollback | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    """The advice of all levers, the next step at which the service lowers the rate, and what the trainer applied.

    `learning_rate_sum` is Σ η up to the newest closed step, None if no learning rate is logged.
    """

    advice: Advice
    advised_scale: float
    next_decay_step: int | None
    applied: Applied | None = None
    learning_rate_sum: float | None = None
    reported: Mapping[BesideTheRate, LeverReport] = field(default_factory=dict)


def advice_record(value: Mapping[str, Any]) -> AdviceRecord:
    """Parse the advice of all levers, or of the rate. Raises KeyError, TypeError or ValueError if it is invalid."""
    advice = Advice.from_json(value)
    reports = {name: (value.get(name) or {}).get("applied") for name in BESIDE_THE_RATE}
    value = value.get("rate") or value
    applied = value.get("applied")
    return AdviceRecord(
        advice,
        number_or_nan(value.get("advised_scale", value.get("scale"))),
        value.get("next_decay_step"),
        None if applied is None else parse(Applied, applied),
        value.get("learning_rate_sum"),
        {name: parse(LeverReport, report) for name, report in reports.items() if report is not None},
    )


class DecisionRecord(Record):
    """One entry of the append-only log of decisions on the learning rate."""

    revision: int
    attempt: int
    kind: DecisionKind
    effective_from_step: int
    reason: str
    author: Author
    made_at_us: int
    lever: Lever = "rate"
    value: Annotated[float | Correction | Rollback | None, "from the step on: of the loop's scale, or of the lever"] = (
        None
    )


class RuleRecord(Record):
    """A rule: what it reads, its thresholds and their source; docs/early-warning.md has the fields."""

    name: str
    key: Annotated[str, "comparison:measure, or scalars:name"]
    severity: Severity
    cause: Annotated[str, "rules that fire for one cause are one episode"]
    why: str
    what_to_do: str
    source: Annotated[str, "where the threshold comes from"]
    absolute: float | None = None
    relative: Annotated[float | None, "factor on the run's own baseline, or on `reference`"] = None
    reference: str | None = None
    direction: str = ""
    ideal: float
    pooled: Annotated[str | None, "null: steps in a row count; else evidence is pooled over steps"] = None
    minimum_duration: int
    cooldown_steps: int
    lag_zero_only: bool = False
    corroborates_surge: bool = False
    follows_learning: Annotated[bool, "values beyond the threshold enter the baseline while the reward rises"] = False
    effect: str = ""


class RulesRecord(Record):
    """The rules that watch runs of a kind of model."""

    model_kind: ModelKind | None
    rules: tuple[RuleRecord, ...]
