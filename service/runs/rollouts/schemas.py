"""Single tokens of rollouts over HTTP."""

from __future__ import annotations

import orjson
from pydantic import BaseModel, Field

from foreshock_service.platform.columnar.formats import json_rows, json_values
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.rollouts.chosen_tokens import LOG_PROB
from foreshock_service.runs.rollouts.tokens import FoundTokens
from foreshock_service.runs.shard_schemas import AnswerOfStep


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
    """Return the JSON of a `TokensRead`; a model of each token takes thirty times as long."""
    values = {name: json_values(column) for name, column in found.table.columns.items()}
    fields: list[tuple[bytes, list[bytes]]] = []
    before = b'{"'
    for name in ("sample_id", "shard", "position", "token_id", "generated", "d"):
        fields.append((before + name.encode() + b'":', values[name]))
        before = b',"'
    before = b',"log_probs":{'
    for scorer in found.scorers:
        fields.append((before + orjson.dumps(scorer) + b":", values[LOG_PROB + scorer]))
        before = b","
    beside = orjson.dumps(
        {
            "incomplete": found.incomplete.model_dump() if found.incomplete is not None else None,
            "comparison": found.comparison,
            "step": found.step,
            "attempt": found.attempt,
            "sample_id": found.sample_id,
            "prompt_token_ids": found.prompt,
            "scorers": found.scorers,
            "coverage": found.coverage.model_dump(),
        }
    )
    end = b"}}" if found.scorers else before + b"}}"
    return b"".join([beside[:-1], b',"items":[', json_rows(fields, end), b"]}"])
