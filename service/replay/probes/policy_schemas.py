"""The body of a probe policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from foreshock.scorers import default_scorers
from foreshock_service.platform.parameters import LARGEST_STEP
from foreshock_service.replay.probes.schemas import Accelerator, ScorerRequest


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
