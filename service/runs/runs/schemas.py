"""What runs look like over HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from foreshock.model_kind import ModelKind
from service.platform.schemas import Name

RunState = Literal["running", "finished", "failed"]
AdviceMode = Literal["shadow", "apply"]


class RunCreate(BaseModel):
    """A run to get or create: (project, key) is its identity, the rest describes it when it is new."""

    key: Name = Field(description="the client's own name for the run, unique in the project")
    project: Name = "default"
    name: Name | None = None
    model: Name | None = None
    trainer: Name | None = None
    engine: Name | None = None
    hardware: Name | None = None
    initial_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    length_cap: int | None = Field(default=None, gt=0, lt=2**31)
    model_kind: ModelKind | None = Field(
        default=None, description="decides the healthy ranges; absent: derived from an announced checkpoint"
    )
    advice_mode: AdviceMode = "shadow"


class RunUpdate(BaseModel):
    """What may change later; absent fields stay as they are."""

    model_config = ConfigDict(extra="forbid")

    state: RunState | None = None
    name: Name | None = None
    advice_mode: AdviceMode | None = None
    model_kind: ModelKind | None = Field(
        default=None, description="null: no longer declared, so that the checkpoint's kind holds"
    )


class RunRead(BaseModel):
    """A run."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    key: str
    project: str
    name: str | None
    model: str | None
    trainer: str | None
    engine: str | None
    hardware: str | None
    initial_learning_rate: float | None
    length_cap: int | None
    model_kind: ModelKind | None = Field(description="null: unknown, and judged as dense")
    model_kind_source: Literal["declared", "checkpoint"] | None
    advice_mode: AdviceMode
    state: RunState
    last_step: int | None = Field(description="the newest step of which rollouts came")
    created_at_us: int
    updated_at_us: int
