"""What measurements look like over HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class MeasureRead(BaseModel):
    """A registered measure: what it means and where it comes from."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    column: str = Field(description="its name in JSON, CSV, Parquet and SQL")
    kind: str
    formula: str
    unit: str
    direction: str
    aggregation: str
    source: str


class MeasurementColumns(BaseModel):
    """Equally long lists; beside those named here one list a measure (null where not estimable)."""

    model_config = ConfigDict(extra="allow")

    step: list[int]
    attempt: list[int]
    comparison: list[str]
    from_sample: list[bool] = Field(description="whether only some of the step's rollouts took part")


class MeasurementsRead(BaseModel):
    """Measurements by column, ordered by comparison and step."""

    columns: MeasurementColumns


class BucketColumns(BaseModel):
    """One entry a bucket; null where a bucket holds no tokens."""

    tokens: list[int]
    mean_abs_d: list[float | None]
    mean_d: list[float | None]
    k3_kl: list[float | None]
    max_abs_d: list[float | None]
    mean_abs_probability_difference: list[float | None]


class BucketsRead(BaseModel):
    """Tokens in buckets: bucket i holds edges[i] ≤ value < edges[i + 1], the first all below and the last all above."""

    by: str = Field(description="what the buckets are of")
    meaning: str
    unit: str
    edges: list[float | None] = Field(description="null at an end that has no bound")
    columns: BucketColumns


class TokenIdColumns(BaseModel):
    """One entry a token id, the largest Σ k3 first."""

    token_id: list[int]
    tokens: list[int]
    mean_abs_d: list[float | None]
    mean_d: list[float | None]
    k3_kl: list[float | None]
    k3_sum: list[float | None] = Field(description="Σ k3 of the id's tokens")
    k3_sum_missing: list[float | None] = Field(description="what Σ k3 may have beyond that; null: not bounded")


class TokenIdsRead(BaseModel):
    """Tokens by their id; of each shard the ids that matter most are kept, and what that leaves out is bounded."""

    by: Literal["token_id"] = "token_id"
    meaning: str = "the token's id in the vocabulary"
    unit: str = "1"
    k3_sum_unnamed: float | None = Field(description="the most that an id that is not named can have; null: no bound")
    columns: TokenIdColumns
