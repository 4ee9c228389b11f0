"""What probes look like over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from service.platform.database.tables.probes import Probe, ProbeJob
from service.platform.schemas import AttemptNumber, JsonObject, Step
from service.replay.leases.transitions import JobState, state_of_probe

ScorerName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")]
VariantName = Annotated[str, StringConstraints(max_length=100, pattern=r"^[a-z0-9_.-]*$")]
Accelerator = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class ScorerRequest(BaseModel):
    """A scorer, and the variant of it: empty, or `rebatched` for its noise floor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: ScorerName
    variant: VariantName = ""


class ProbeCreate(BaseModel):
    """What to score. An equal request for the same rollouts and weights is the same probe."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    attempt: AttemptNumber | None = Field(default=None, description="absent: the attempt in which the step is active")
    scorers: list[ScorerRequest] = Field(min_length=1, max_length=32)
    kind: Literal["exact"] = Field(default="exact", description="exact: with the weights that sampled the step")
    accelerator: Accelerator | None = Field(default=None, description="only on workers of this accelerator")
    max_rollouts: int | None = Field(default=None, ge=1, le=2**31 - 1, description="a sample, stratified by length")
    options: dict[ScorerName, JsonObject] = Field(default_factory=dict, description="by scorer; the worker checks them")
    checkpoint_step: Step | None = Field(default=None, description="an exact probe takes that of the step itself")


class JobRead(BaseModel):
    """The part of a probe that one engine does; `attempts` counts tries."""

    id: str
    engine: str
    scorers: list[ScorerRequest]
    state: JobState
    attempts: int
    reason: str | None
    reasons: list[str] = Field(description="what went wrong in each try")
    worker: str | None
    accelerator: str | None

    @classmethod
    def of(cls, job: ProbeJob) -> Self:
        """The job as it is shown."""
        return cls(
            id=job.id,
            engine=job.engine,
            scorers=[ScorerRequest(**each) for each in job.scorers],
            state=JobState(job.state),
            attempts=job.tries,
            reason=job.reason,
            reasons=list(job.reasons),
            worker=job.worker,
            accelerator=job.accelerator,
        )


class ProbeRead(BaseModel):
    """A probe with its jobs; its state follows from theirs."""

    id: str
    run: str
    attempt: int
    step: int
    kind: str
    scorers: list[ScorerRequest]
    options: dict[str, Any]
    state: JobState
    reason: str | None
    rollouts: int
    tokens: int
    from_sample: bool = Field(description="whether `max_rollouts` left some of the step's rollouts out")
    jobs: list[JobRead]
    created_at_us: int

    @classmethod
    def of(cls, probe: Probe, jobs: Sequence[ProbeJob]) -> Self:
        """The probe as it is shown."""
        state, reason = state_of_probe(list(jobs))
        return cls(
            id=probe.id,
            run=probe.run_id,
            attempt=probe.attempt,
            step=probe.step,
            kind=probe.kind,
            scorers=[ScorerRequest(**each) for each in probe.scorers],
            options=dict(probe.options),
            state=state,
            reason=reason,
            rollouts=probe.rollouts,
            tokens=probe.tokens,
            from_sample=probe.from_sample,
            jobs=[JobRead.of(job) for job in jobs],
            created_at_us=probe.created_at_us,
        )
