"""Schemas of changes within a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from foreshock_service.platform.schemas import NO_NUL

Text = Annotated[str, StringConstraints(max_length=1000, pattern=NO_NUL)]


class ChangePut(BaseModel):
    """A change that the trainer announces; the baselines of the detectors begin anew at its step."""

    note: Text | None = Field(default=None, description="what changed, in words")
    before: Text | float | None = Field(default=None, description="such as the old length cap")
    after: Text | float | None = None
