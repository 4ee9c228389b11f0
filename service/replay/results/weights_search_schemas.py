"""The HTTP schemas of weights searches."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock.weights_search import WeightsReplay, WeightsSearch
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


class ReplayRead(ReplayBody):
    """One replay, with its weights in words."""

    weights: str
    announced: bool = Field(description="the announced weights of the searched step")
    at_noise_floor: bool = Field(description="k3 is within `bound`")

    @classmethod
    def of(cls, search: WeightsSearch, replay: WeightsReplay) -> Self:
        """Return the replay as it is shown."""
        return cls(
            step=replay.step,
            part=replay.part,
            k3_kl=replay.k3_kl,
            k3_low=replay.k3_low,
            k3_high=replay.k3_high,
            max_abs_d=replay.max_abs_d,
            skipped=replay.skipped,
            weights=search.describe(replay),
            announced=search.is_announced(replay),
            at_noise_floor=search.reproduces(replay),
        )


class WeightsSearchRead(BaseModel):
    """The newest weights search of a step: replays in the order in which they were made."""

    run: str
    attempt: int
    step: int
    scorer: str
    rollouts: int
    tokens: int
    floor_k3: float | None
    bound: float = Field(description="largest k3 that counts as reproduced, in nats per token")
    tied: bool
    replays: list[ReplayRead]
    confirmed_k3: float | None
    ended: str

    @classmethod
    def of(cls, run: str, attempt: int, search: WeightsSearch) -> Self:
        """Return the search as it is shown."""
        return cls(
            run=run,
            attempt=attempt,
            step=search.step,
            scorer=search.scorer,
            rollouts=search.rollouts,
            tokens=search.tokens,
            floor_k3=search.floor_k3,
            bound=search.bound,
            tied=search.tied,
            replays=[ReplayRead.of(search, replay) for replay in search.replays],
            confirmed_k3=search.confirmed_k3,
            ended=search.ended,
        )
