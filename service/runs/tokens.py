"""Single tokens from the store: the worst of a step, or one rollout with its tokens or with all that was logged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import orjson
from fastapi import APIRouter, Query, Request, Response
from numpy.typing import NDArray

from foreshock.api.records import to_json
from foreshock.api.runs import Coverage, IncompleteStep
from foreshock.api.steps import TokensRecord
from foreshock.comparisons import TRAINER_ROLLOUT, split_comparison
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.parquet_files import find_rollouts
from foreshock.rollouts.schema import ROLLOUT_COLUMNS
from foreshock_service.platform.columnar import (
    FORMATS,
    JSON_MEDIA_TYPE,
    AnswerTooLarge,
    ColumnTable,
    Format,
    Labels,
    choose_format,
    columnar_response,
    render,
)
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import ProblemError, stored_file
from foreshock_service.platform.security import Principal, Reader
from foreshock_service.runs.attempts import resolve_step
from foreshock_service.runs.chosen_tokens import (
    LOG_PROB,
    TOKEN_COLUMNS,
    ChosenTokens,
    bounds_of_rollouts,
    read_worst_first,
    scores_of,
)
from foreshock_service.runs.curves import Comparison
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.measurements import MeasurementNotFound, check_comparison
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.runs.runs import get_run
from foreshock_service.runs.shards import shards_with_tokens
from foreshock_service.runs.steps import coverage_of_step, find_step, incomplete_step

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])

LARGEST_POSITION = 2**31 - 1
LONGEST_SAMPLE_ID = 1024
_EVERY_COLUMN = tuple(column.name for column in ROLLOUT_COLUMNS)


class RolloutNotFound(ProblemError):
    """Missing rollout: the step has none with that sample id."""

    status = 404
    problem_type = "rollout-not-found"


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """Request for tokens: the `worst` of a step by |d|, or those of one rollout if `sample_id` is given.

    Of a rollout, `from_position` ≤ position ≤ `to_position`.
    """

    run_id: str
    step: int
    attempt: int | None
    comparison: str
    worst: int
    sample_id: str | None
    from_position: int = 0
    to_position: int = LARGEST_POSITION


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """The requested tokens, a row each: in order of position, or of decreasing |d|.

    Columns: sample_id, shard, position in the response, token_id, generated, d, then one for each of `scorers`,
    `log_prob.` and its name. `prompt` has the token ids of the requested rollout's prompt.
    """

    comparison: str
    step: int
    attempt: int
    sample_id: str | None
    prompt: list[int] | None
    scorers: tuple[str, ...]
    coverage: Coverage
    incomplete: IncompleteStep | None
    table: ColumnTable

    def log_probs(self, scorer: str) -> NDArray[np.float32]:
        """Return the log-prob of each token by a scorer, NaN if it is missing."""
        return self.table.array(LOG_PROB + scorer)


@router.get("/tokens", response_model=TokensRecord, responses=FORMATS)
def read_tokens(
    run: RunIdentifier,
    step: StepPath,
    request: Request,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest |d| first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="last, of a rollout")] = LARGEST_POSITION,
    attempt: ActiveOrAttempt = None,
    format_name: Format = None,
) -> Response:
    """Return the worst tokens of a step, or one rollout token by token, with each scorer's log-prob.

    CSV and Parquet have a row for each token, and of each scorer a column `log_prob.` with its name.
    """
    media_type = choose_format(request.headers.get("accept"), format_name)
    query = TokenQuery(run, step, attempt, comparison, worst, sample_id, from_position, to_position)
    found = find_tokens(context, principal, query)
    body = _tokens_json(found) if media_type == JSON_MEDIA_TYPE else render(found.table, media_type)
    return columnar_response(request, body, media_type)


def _tokens_json(found: FoundTokens) -> bytes:
    """Return the JSON of a `TokensRecord`; a model of each token takes thirty times as long."""
    columns = {
        name: column.strings() if isinstance(column, Labels) else column.tolist()
        for name, column in found.table.columns.items()
    }
    scores = [columns.pop(LOG_PROB + scorer) for scorer in found.scorers]
    items = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for place, item in enumerate(items):
        item["log_probs"] = {name: values[place] for name, values in zip(found.scorers, scores, strict=True)}
    # NaN and infinite values become null.
    return orjson.dumps(
        {
            "incomplete": to_json(found.incomplete) if found.incomplete is not None else None,
            "comparison": found.comparison,
            "step": found.step,
            "attempt": found.attempt,
            "sample_id": found.sample_id,
            "prompt_token_ids": found.prompt,
            "scorers": found.scorers,
            "coverage": to_json(found.coverage),
            "items": items,
        }
    )


def find_tokens(context: ServiceContext, principal: Principal, query: TokenQuery) -> FoundTokens:
    """Return the requested tokens.

    Raises UnknownComparison, RolloutNotFound, TokensPurged, AnswerTooLarge, and MeasurementNotFound if one of the
    scores is missing.
    """
    check_comparison(query.comparison)
    target, behaviour = split_comparison(query.comparison)
    chosen = ChosenTokens(target, behaviour)
    with context.database.read() as session:
        get_run(session, principal, query.run_id)
        key = resolve_step(session, query.run_id, query.step, query.attempt)
        coverage = coverage_of_step(session, key)
        incomplete = incomplete_step(find_step(session, key))
        files = shards_with_tokens(session, key)
        if query.sample_id is not None:
            found = find_rollout(context, key, files, query.sample_id)
            if found is not None:
                shard, batch = found
                scores = scores_of(context, session, key, batch)
                chosen.add_rollout(shard, batch, scores, query.from_position, query.to_position)
        else:
            bounds = bounds_of_rollouts(session, key, query.comparison)
            for place, batch in read_worst_first(context, key, files, bounds, chosen):
                chosen.add_worst(place, batch, scores_of(context, session, key, batch), query.worst)
    if query.sample_id is not None and not chosen.parts:
        raise rollout_not_found(key, query.sample_id, coverage)
    if not chosen.compared and query.sample_id is None:
        raise MeasurementNotFound(f"step {query.step} of attempt {key.attempt} has no {query.comparison}")
    scorers = tuple(sorted(chosen.scorers))
    table = chosen.table(scorers)
    if query.sample_id is None:
        # Stable: of equal values, the earlier shard and position come first.
        table = table.rows(np.argsort(-np.abs(table.array("d")), kind="stable")[: query.worst])
    if table.num_values > context.settings.max_answer_values:
        raise AnswerTooLarge(
            f"the answer has {table.num_values:,} values, more than the {context.settings.max_answer_values:,} of "
            "FORESHOCK_MAX_ANSWER_VALUES: ask for a part of the rollout (from_position, to_position)"
        )
    prompt = chosen.prompt if query.sample_id is not None else None
    return FoundTokens(
        query.comparison, query.step, key.attempt, query.sample_id, prompt, scorers, coverage, incomplete, table
    )


def rollout_not_found(key: StepKey, sample_id: str, coverage: Coverage) -> RolloutNotFound:
    """Return the error that names the step, the rollout, and among which rollouts it was sought."""
    among = "" if coverage.rests_on == "all tokens" else f" among the {coverage.text} that are stored in full"
    return RolloutNotFound(f"step {key.step} of attempt {key.attempt} has no rollout {sample_id!r}{among}")


def find_rollout(
    context: ServiceContext,
    key: StepKey,
    files: Sequence[Shard],
    sample_id: str,
    only: Collection[str] = TOKEN_COLUMNS,
) -> tuple[int, RolloutBatch] | None:
    """Return (shard, the rollout) of the first shard that has it, with these columns; None if none does."""
    for file in files:
        with stored_file(f"shard {file.shard} of step {key.step}"):
            group = find_rollouts(context.store.file(file.file), [sample_id], stored_limits(), only=only)
        if group is not None:
            return file.shard, group.select([group.sample_ids.index(sample_id)])
    return None


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A batch of this one rollout, and the log-prob of each response token by scorer, [T], NaN if it is missing."""

    attempt: int
    batch: RolloutBatch
    scores: Mapping[str, NDArray[np.float32]]


def read_whole_rollout(
    context: ServiceContext, principal: Principal, run_id: str, step: int, sample_id: str
) -> WholeRollout:
    """Return a rollout of the active step. Raises RunNotFound, StepNotFound, RolloutNotFound, TokensPurged."""
    with context.database.read() as session:
        get_run(session, principal, run_id)
        key = resolve_step(session, run_id, step, None)
        found = find_rollout(context, key, shards_with_tokens(session, key), sample_id, _EVERY_COLUMN)
        if found is None:
            raise rollout_not_found(key, sample_id, coverage_of_step(session, key))
        _, batch = found
        return WholeRollout(key.attempt, batch, scores_of(context, session, key, batch))
