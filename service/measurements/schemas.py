"""What measurements look like over HTTP."""

from __future__ import annotations

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
    """Tokens by their probability under the behaviour score: bucket i lies between edges i and i + 1."""

    edges: list[float]
    columns: BucketColumns


class TokenRow(BaseModel):
    """One response token with each scorer's log-prob; null where a scorer gave no finite one."""

    sample_id: str
    shard: int
    position: int = Field(description="in the response, from 0")
    token_id: int
    generated: bool = Field(description="sampled by the model; false: tool output, in no measure")
    d: float | None = Field(description="log target − log behaviour")
    log_probs: dict[str, float | None]


class TokensRead(BaseModel):
    """Tokens of one step: the worst by |d|, or one rollout in order."""

    comparison: str
    step: int
    attempt: int
    sample_id: str | None = None
    prompt_token_ids: list[int] | None = Field(default=None, description="of the one rollout asked for")
    scorers: list[str]
    items: list[TokenRow]
