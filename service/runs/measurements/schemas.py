"""Schemas of measurements."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from foreshock.api.runs import IncompleteStep, StatisticsStep


class MeasurementColumns(BaseModel):
    """Columns of equal length; in addition to these, one list per measure (null: not estimable)."""

    model_config = ConfigDict(extra="allow")

    step: list[int]
    attempt: list[int]
    comparison: list[str]
    from_sample: list[bool] = Field(description="true: only some of the step's rollouts are included")


class MeasurementsRead(BaseModel):
    """Measurements by column, ordered by comparison and step."""

    columns: MeasurementColumns
    incomplete_steps: list[IncompleteStep] = Field(description="those among the steps of `columns`")
    statistics_steps: list[StatisticsStep] = Field(
        description="those of which shards were sent as statistics, newest first, at most 1,000"
    )
