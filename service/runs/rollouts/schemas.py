"""Single tokens of rollouts over HTTP."""

from __future__ import annotations

import orjson

from foreshock.api.records import to_json
from foreshock_service.platform.columnar import json_rows, json_values
from foreshock_service.runs.rollouts.chosen_tokens import LOG_PROB
from foreshock_service.runs.rollouts.tokens import FoundTokens


def tokens_json(found: FoundTokens) -> bytes:
    """Return the JSON of a `TokensRecord`; a model of each token takes thirty times as long."""
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
            "incomplete": to_json(found.incomplete) if found.incomplete is not None else None,
            "comparison": found.comparison,
            "step": found.step,
            "attempt": found.attempt,
            "sample_id": found.sample_id,
            "prompt_token_ids": found.prompt,
            "scorers": found.scorers,
            "coverage": to_json(found.coverage),
        }
    )
    end = b"}}" if found.scorers else before + b"}}"
    return b"".join([beside[:-1], b',"items":[', json_rows(fields, end), b"]}"])
