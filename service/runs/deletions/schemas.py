"""Schemas of deletions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from foreshock_service.platform.database.tables import Deletion

_Id = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class DeletionCreate(BaseModel):
    """Rollouts to delete: those with one of these sample ids, and those of one of these prompt groups."""

    model_config = ConfigDict(extra="forbid")

    sample_ids: list[_Id] = Field(default_factory=list, max_length=10_000)
    group_ids: list[_Id] = Field(default_factory=list, max_length=10_000)


class DeletionRead(BaseModel):
    """A deletion and how far it is. The ids are not kept."""

    id: str
    state: Literal["running", "done"]
    sample_ids: int = Field(description="number of sample ids asked for")
    group_ids: int = Field(description="number of group ids asked for")
    steps: int = Field(description="steps with deleted rollouts so far")
    rollouts: int = Field(description="rollouts deleted so far")
    files: int = Field(description="files rewritten or given up so far")
    requested_at_us: int
    finished_at_us: int | None

    @classmethod
    def of(cls, row: Deletion) -> Self:
        """Convert a row."""
        return cls(
            id=row.id, state="running" if row.finished_at_us is None else "done", sample_ids=len(row.sample_digests),
            group_ids=len(row.group_digests), steps=row.steps, rollouts=row.rollouts, files=row.files,
            requested_at_us=row.requested_at_us, finished_at_us=row.finished_at_us,
        )  # fmt: skip
