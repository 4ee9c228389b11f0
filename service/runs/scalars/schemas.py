"""Schemas of scalars."""

from __future__ import annotations

from pydantic import BaseModel, Field

from foreshock_service.platform.schemas import Name


class ScalarsPut(BaseModel):
    """Values of one source for one step. Existing names are overwritten; other names of the source stay."""

    source: Name = "trainer"
    values: dict[Name, float | None] = Field(
        min_length=1, max_length=1000, description="null: the source computed a value that is not finite"
    )


class ScalarColumns(BaseModel):
    """Columns of scalars: lists of equal length."""

    step: list[int] = Field(default_factory=list)
    attempt: list[int] = Field(default_factory=list)
    source: list[str] = Field(default_factory=list)
    name: list[str] = Field(default_factory=list)
    value: list[float | None] = Field(default_factory=list)


class ScalarsRead(BaseModel):
    """Scalars by column, ordered by name, source and step."""

    columns: ScalarColumns
