"""Single tokens of rollouts over HTTP."""

from __future__ import annotations

from pydantic import BaseModel, Field

from service.runs.coverage.schemas import CoverageRead
from service.runs.shard_counts import AnswerOfStep


class TokenRow(BaseModel):
    """Response token with each scorer's log-prob; null if it is missing or not finite."""

    sample_id: str
    shard: int
    position: int = Field(description="index in the response, from 0")
    token_id: int
    generated: bool = Field(description="true: sampled by the model; false: tool output, excluded from all measures")
    d: float | None = Field(description="log target − log behaviour")
    log_probs: dict[str, float | None]


class TokensRead(AnswerOfStep):
    """Tokens of one step: the worst by |d|, or one rollout in order."""

    comparison: str
    step: int
    attempt: int
    sample_id: str | None = None
    prompt_token_ids: list[int] | None = Field(default=None, description="prompt of the requested rollout")
    scorers: list[str]
    coverage: CoverageRead = Field(description="the rollouts in full: of the others no token is stored")
    items: list[TokenRow]
