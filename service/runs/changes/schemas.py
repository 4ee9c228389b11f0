"""Schemas of changes within a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from foreshock.changes import ChangeKind
from foreshock_service.platform.schemas import NO_NUL
from foreshock_service.runs.changes.setups import Plain

Text = Annotated[str, StringConstraints(max_length=1000, pattern=NO_NUL)]


class ChangePut(BaseModel):
    """A change that the trainer announces; the baselines of the detectors begin anew at its step."""

    note: Text | None = Field(default=None, description="what changed, in words")
    before: Text | float | None = Field(default=None, description="such as the old length cap")
    after: Text | float | None = None


class DifferenceRead(BaseModel):
    """A field of the setup, such as `engine.dtype`, and its values before and after."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    before: list[Plain]
    after: list[Plain]


class ChangeRead(BaseModel):
    """A change at a step: announced by the trainer, or of the setup that its rollouts name."""

    step: int = Field(description="the first step with what is new")
    attempt: int
    kind: ChangeKind | Literal["setup"]
    note: str | None = None
    before: str | float | None = None
    after: str | float | None = None
    differences: list[DifferenceRead] = Field(default=[], description="of the setup; else empty")
    rebaseline: bool = Field(description="whether the baselines of the detectors begin anew at this step")
