"""Schemas of deletions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_Id = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class DeletionCreate(BaseModel):
    """Rollouts to delete: those with one of these sample ids, and those of one of these prompt groups."""

    model_config = ConfigDict(extra="forbid")

    sample_ids: list[_Id] = Field(default_factory=list, max_length=10_000)
    group_ids: list[_Id] = Field(default_factory=list, max_length=10_000)
