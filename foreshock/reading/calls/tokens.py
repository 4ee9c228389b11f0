"""The calls that read the tokens of a step: in buckets, by token id, the worst ones, those of one rollout."""

from __future__ import annotations

from functools import partial
from typing import Literal

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.reading import columns
from foreshock.reading.columns import Buckets, TokenIds, Tokens
from foreshock.reading.parsing import parse
from foreshock.reading.request import Query, Request, json_request, run_path
from foreshock.reading.step_records import ExactTokensRecord

__all__ = ["Condition", "buckets", "exact_tokens", "rollout_tokens", "token_ids", "worst_tokens"]

Condition = Literal["probability", "position", "turn", "length", "entropy", "lag"]


def buckets(
    run: str,
    step: int,
    *,
    by: Condition = "probability",
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Buckets]:
    """Return the mismatch of a step in buckets of a condition of its tokens."""
    query: Query = [("by", by), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "buckets"), query, columns.buckets)


def token_ids(
    run: str,
    step: int,
    *,
    limit: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[TokenIds]:
    """Return the mismatch of a step by token id; `limit` is the largest number of ids."""
    query: Query = [("by", "token_id"), ("limit", limit), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "buckets"), query, columns.token_ids)


def worst_tokens(
    run: str, step: int, *, count: int = 20, comparison: str = TRAINER_ROLLOUT, attempt: int | None = None
) -> Request[Tokens]:
    """Return the tokens of a step with the largest |d|, at most 1,000."""
    query: Query = [("worst", count), ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "tokens"), query, columns.tokens)


def rollout_tokens(
    run: str,
    step: int,
    sample_id: str,
    *,
    from_position: int = 0,
    to_position: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Tokens]:
    """Return one rollout token by token, from one position of the response to another (included)."""
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("sample_id", sample_id), *part, ("comparison", comparison), ("attempt", attempt)]
    return json_request(run_path(run, "steps", step, "tokens"), query, columns.tokens)


def exact_tokens(
    run: str,
    step: int,
    *,
    pair: str | None = None,
    count: int = 20,
    sample_id: str | None = None,
    from_position: int = 0,
    to_position: int | None = None,
    attempt: int | None = None,
) -> Request[ExactTokensRecord]:
    """Return the tokens with the largest KL(μ‖π), at most 1,000, or those of the rollout `sample_id`.

    Of a rollout, from one position of the response to another (included). `pair` is one that `exact` returned; None:
    the service's default.
    """
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("pair", pair), ("worst", count), ("sample_id", sample_id), *part, ("attempt", attempt)]
    read = partial(parse, ExactTokensRecord)
    return json_request(run_path(run, "steps", step, "exact", "tokens"), query, read)
