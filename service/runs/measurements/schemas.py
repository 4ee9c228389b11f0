"""Schemas of measurements."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from foreshock_service.runs.coverage.schemas import CoverageRead, StatisticsStep
from foreshock_service.runs.shard_schemas import AnswerOfStep, IncompleteStep


class MeasureRead(BaseModel):
    """Registered measure: its meaning and its source."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    column: str = Field(description="column name in JSON, CSV, Parquet and SQL")
    kind: str
    formula: str
    unit: str
    direction: str
    aggregation: str
    source: str


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


class BucketColumns(BaseModel):
    """Columns with one entry per bucket; null if the bucket has no tokens."""

    tokens: list[int]
    mean_abs_d: list[float | None]
    mean_d: list[float | None]
    k3_kl: list[float | None]
    max_abs_d: list[float | None]
    mean_abs_probability_difference: list[float | None]


class BucketsRead(AnswerOfStep):
    """Tokens in buckets: bucket i holds edges[i] ≤ value < edges[i + 1], the first all below and the last all above."""

    by: str = Field(description="condition that defines the buckets")
    meaning: str
    unit: str
    edges: list[float | None] = Field(description="bucket edges; null: unbounded end")
    coverage: CoverageRead
    columns: BucketColumns


class TokenIdColumns(BaseModel):
    """Columns with one entry per token id, largest Σ k3 first."""

    token_id: list[int]
    tokens: list[int]
    mean_abs_d: list[float | None]
    mean_d: list[float | None]
    k3_kl: list[float | None]
    k3_sum: list[float | None] = Field(description="Σ k3 of the id's tokens")
    k3_sum_missing: list[float | None] = Field(
        description="upper bound of the part of Σ k3 that was omitted; null: no bound"
    )


class TokenIdsRead(AnswerOfStep):
    """Tokens by id. Each shard keeps the ids with the largest Σ k3; the omitted part is bounded."""

    by: Literal["token_id"] = "token_id"
    meaning: str = "the token's id in the vocabulary"
    unit: str = "1"
    coverage: CoverageRead
    k3_sum_unnamed: float | None = Field(description="upper bound of Σ k3 of an id that is not listed; null: no bound")
    columns: TokenIdColumns
