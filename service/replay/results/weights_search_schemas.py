"""The body of a weights search."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock_service.platform.parameters import LARGEST_STEP, NO_NUL, Step
from foreshock_service.replay.probes.schemas import ScorerName

MOST_ROWS = 1_000
Part = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[a-z0-9_.+-]+$")]
Text = Annotated[str, StringConstraints(max_length=1_000, pattern=NO_NUL)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ReplayBody(BaseModel):
    """One replay: the announced weights of the searched step, of which `part` is that of the announced `step`."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    part: Part = Field(description="all, or names joined by `+`: lm_head, embeddings, layers, layers.3, other")
    k3_kl: Nats | None = Field(default=None, description="against the logged `rollout`, in nats per token")
    k3_low: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description=f"bootstrap-t interval by prompt group: a {RANGE}. {RANGE_NOTE}",
    )
    k3_high: float | None = Field(default=None, allow_inf_nan=False)
    max_abs_d: Nats | None = None
    skipped: Text = Field(default="", description="why the replay was not made")


class WeightsSearchBody(BaseModel):
    """The result of a search, as a worker sends it."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    scorer: ScorerName
    rollouts: int = Field(ge=0, le=LARGEST_STEP)
    tokens: int = Field(ge=0, lt=2**63)
    floor_k3: Nats | None = Field(default=None, description="k3 of the scorer against itself in other batches")
    tied: bool = Field(default=False, description="head and embeddings are one tensor of the model")
    replays: list[ReplayBody] = Field(max_length=MOST_ROWS)
    confirmed_k3: Nats | None = Field(
        default=None, description="k3 of the best other weights in an engine that was started with them"
    )
    ended: Text = Field(default="", description="why the search ended")
