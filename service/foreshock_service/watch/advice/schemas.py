"""Schemas of the advice."""

from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foreshock.learning_rate.advice import AdvicePhase, OperatorKind
from foreshock.learning_rate.length_decay import Point, Schedule
from foreshock.learning_rate.levers import Correction, Rollback, lever_of
from foreshock.learning_rate.modes import AdviceMode, Author, Lever
from foreshock.learning_rate.remedy import RemedyName
from foreshock.severity import Severity
from foreshock_service.platform.parameters import AttemptNumber, Name, Step

Value = TypeVar("Value", Correction, Rollback)


class AdviceAlertRead(BaseModel):
    """An open alert, as trainers get it."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    rule: str
    step: int
    severity: Severity
    value: float
    threshold: float
    why: str
    what_to_do: str


class AppliedRead(BaseModel):
    """The newest acknowledgement of the attempt's trainer."""

    model_config = ConfigDict(from_attributes=True)

    step: int
    revision: int = Field(description="the newest revision that the trainer knew")
    learning_rate: float = Field(validation_alias="applied_learning_rate")
    scale: float | None = Field(
        validation_alias="applied_scale", description="the factor in it; null if the trainer reported the rate only"
    )
    received_at_us: int


class ControlRead(BaseModel):
    """What the control loop measures, in nats per token; null: not measured."""

    driven: float | None = Field(description="k3 of lagging tokens minus the static part")
    set_point: float = Field(description="of the driven part")
    static: float | None = Field(description="k3 at lag 0, which no learning rate changes")
    update: float | None = Field(description="k3 of the newest update, if the trainer logs update_k3")
    update_set_point: float
    error: float = Field(description="moving average of the log of the value farther beyond its set point")
    finding: str | None = Field(description="a mismatch that does not follow the learning rate")


class AdviceRead(BaseModel):
    """The whole state: `scale(step) = max(floor, min(loop, factor^halvings))` of the last of `points` up to the step.

    It is absolute, so that a missing, late or repeated answer cannot compound. `scale` multiplies the base learning
    rate at the step asked for; in shadow mode it is 1.0, and `advised_scale` is the advice.
    """

    run: str = Field(description="id of the run")
    attempt: int
    revision: int = Field(description="never decreases within the run")
    scale: float
    advised_scale: float
    schedule: Schedule | None = Field(description="of the surge; its boundaries that count are those of `points`")
    points: list[Point] = Field(description="what is in force from a step on, ascending; the scale is 1 before")
    control: ControlRead | None = Field(description="null: nothing that the learning rate drives is measured")
    factor: float = Field(description="of a halving; also the schedule's")
    floor: float = Field(description="the lowest scale; also the schedule's")
    phase: AdvicePhase
    mode: AdviceMode
    next_decay_step: int | None
    step: int | None = Field(description="the step that was asked for")
    observed_step: int | None = Field(description="the newest closed step")
    learning_rate_sum: float | None = Field(
        description="Σ η up to `observed_step`, a second clock beside the steps; null if no learning rate is logged"
    )
    stale: bool = Field(description="the newest closed step lies far behind the step asked for")
    reason: str
    alerts: list[AdviceAlertRead]
    want_weights_at_step: int | None = Field(description="a step whose weights would be worth saving for a probe")
    applied: AppliedRead | None = Field(description="what the trainer last applied; null: not acknowledged")


class LeverAppliedRead(BaseModel):
    """What the attempt's trainer last reported of a lever."""

    model_config = ConfigDict(from_attributes=True)

    step: int
    revision: int = Field(description="the newest revision that the trainer knew")
    done: Correction | Rollback | None = Field(description="the value that it uses; null: none, as it is configured")
    refused: str | None = Field(description="why it does not use the advised value; null: it does")
    received_at_us: int


class LeverPointRead(BaseModel, Generic[Value]):
    """The value of a lever from a step on; null: none, as the trainer is configured."""

    model_config = ConfigDict(from_attributes=True)

    step: int
    value: Value | None


class LeverRead(BaseModel, Generic[Value]):
    """A lever beside the rate. Its value is that of the last of `points` up to the step asked for; none before."""

    mode: AdviceMode
    held_from_step: int | None = Field(description="null: not held")
    held_by: Author | None
    reason: str = Field(description="of the newest decision on it")
    applied: LeverAppliedRead | None = Field(description="null: not acknowledged")
    value: Value | None = Field(description="to apply at the step asked for; in shadow mode null")
    advised: Value | None
    points: list[LeverPointRead[Value]]


class CorrectionRead(LeverRead[Correction]):
    """The correction of the loss."""

    asked: Correction | None = Field(description="the one that the trainer wants if one is advised; null: token TIS")


class RollbackRead(LeverRead[Rollback]):
    """The checkpoint to go back to, and the command for it. Only a trainer that registered a callback does it."""


class AdviceOfLeversRead(BaseModel):
    """The advice of every lever; each is absolute, so that a missing, late or repeated answer cannot compound."""

    run: str = Field(description="id of the run")
    attempt: int
    revision: int = Field(description="of all levers; never decreases within the run")
    step: int | None = Field(description="the step that was asked for")
    remedy: RemedyName
    why: str = Field(description="the remedy in a sentence; empty: nothing is wrong")
    rate: AdviceRead
    correction: CorrectionRead
    rollback: RollbackRead


class ReportOfStep(BaseModel):
    """What a trainer reports of a step, with the newest revision that it knew."""

    revision: int = Field(ge=0, lt=2**63)
    step: Step
    attempt: AttemptNumber | None = Field(default=None, description="absent: the newest attempt")


class AcknowledgementCreate(ReportOfStep):
    """The learning rate that a trainer used at a step, the scale in it, and the newest revision that it knew."""

    applied_lr: float = Field(ge=0, allow_inf_nan=False)
    applied_scale: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="the factor in it, of the base learning rate"
    )


class LeverReport(ReportOfStep):
    """What a trainer did with a lever at a step, or why it refuses the advised value."""

    refused: Name | None = None


class CorrectionAcknowledgementCreate(LeverReport):
    """The correction that a trainer uses at a step."""

    lever: Literal["correction"]
    done: Correction | None = Field(default=None, description="null: as it is configured")


class RollbackAcknowledgementCreate(LeverReport):
    """The checkpoint that a trainer went back to."""

    lever: Literal["rollback"]
    done: Rollback | None = Field(default=None, description="null: it goes on")


LeverAcknowledgementCreate = CorrectionAcknowledgementCreate | RollbackAcknowledgementCreate


class FollowedStep(BaseModel):
    """The step that a trainer does with the advice."""

    step: Step
    attempt: AttemptNumber | None = Field(default=None, description="absent: the newest attempt")


class ReportNotCounted(BaseModel):
    """A trainer's report that changes no advice, because its attempt is not the newest one of the run."""

    newest_attempt: int | None = Field(description="the attempt that is advised; null: none has begun")
    why: str


class OperatorDecisionCreate(BaseModel):
    """An operator's decision on a lever, and why. After `set` the lever is held."""

    lever: Lever = "rate"
    kind: OperatorKind
    value: Correction | Rollback | None = Field(
        default=None,
        description="of `set`: a correction {kind, threshold}, or a checkpoint {step, root, path}; null: none",
    )
    reason: Name
    seen_revision: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="the revision that the operator saw; refused (409) if an operator has decided since",
    )

    @model_validator(mode="after")
    def _value_is_of_the_lever(self) -> Self:
        if self.value is not None and (self.kind != "set" or lever_of(self.value) != self.lever):
            raise ValueError(f"{self.kind} of the {self.lever} has no such value")
        return self
