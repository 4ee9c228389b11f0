"""Single tokens of rollouts over HTTP."""

from __future__ import annotations

import orjson
from pydantic import BaseModel, Field

from service.runs.coverage.schemas import CoverageRead
from service.runs.rollouts.tokens import FoundTokens
from service.runs.shard_schemas import AnswerOfStep


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


def tokens_json(found: FoundTokens) -> bytes:
    """Return the JSON of a `TokensRead`; a model of each token takes ten times as long."""
    columns = [found.table.strings("sample_id")]
    columns += [found.table.array(name).tolist() for name in ("shard", "position", "token_id", "generated", "d")]
    of_scorers = zip(*(found.log_probs(scorer).tolist() for scorer in found.scorers), strict=True)
    fields = ("sample_id", "shard", "position", "token_id", "generated", "d", "log_probs")
    # NaN and infinite values become null.
    return orjson.dumps(
        {
            "incomplete": found.incomplete.model_dump() if found.incomplete is not None else None,
            "comparison": found.comparison,
            "step": found.step,
            "attempt": found.attempt,
            "sample_id": found.sample_id,
            "prompt_token_ids": found.prompt,
            "scorers": found.scorers,
            "coverage": found.coverage.model_dump(),
            "items": [
                dict(zip(fields, (*row, dict(zip(found.scorers, log_probs, strict=True))), strict=True))
                for *row, log_probs in zip(*columns, of_scorers, strict=True)
            ],
        }
    )
