"""The HTTP schemas of probe policies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from foreshock.scorers import default_scorers
from foreshock_service.platform.parameters import LARGEST_STEP
from foreshock_service.replay.probes.schemas import Accelerator, ScorerRequest

PolicyState = Literal["off", "active", "budget_spent"]


def _default_scorers() -> list[ScorerRequest]:
    return [ScorerRequest(scorer=name) for name in default_scorers()]


class ProbePolicyBody(BaseModel):
    """Which steps are probed automatically. Only steps with an announced checkpoint can be."""

    model_config = ConfigDict(extra="forbid")

    every_steps: Annotated[int, Field(ge=1, le=LARGEST_STEP)] | None = Field(
        default=None, description="probe the first step with a checkpoint in each so many steps; null: none"
    )
    on_alerts: bool = Field(default=False, description="probe the steps near an open alert, before all others")
    rollouts: int = Field(
        default=64, ge=1, le=2**31 - 1, description="score a sample of so many rollouts, stratified by length"
    )
    scorers: list[ScorerRequest] = Field(default_factory=_default_scorers, min_length=1, max_length=32)
    accelerator: Accelerator | None = Field(default=None, description="only on workers of this accelerator")
    budget_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="accelerator seconds that the run's probes may use, those requested by people included; when they "
        "are spent, automatic probes stop; null: no limit",
    )

    @property
    def is_on(self) -> bool:
        """Whether it probes any step."""
        return self.every_steps is not None or self.on_alerts


class ProbePolicyRead(ProbePolicyBody):
    """The policy of a run and what its probes have cost."""

    state: PolicyState
    note: str = Field(description="the state in words")
    spent_seconds: float = Field(description="time for which workers held the run's jobs, failed tries included")
    automatic_probes: int
    impossible_steps: int = Field(description="steps that the policy chose and that could not be probed")
    changed_at_us: int | None = Field(description="null: it was never set")
