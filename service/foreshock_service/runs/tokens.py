"""Tokens from the store: the worst of a step, one rollout, or the step's whole rollouts as a Parquet file."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import Query, Request, Response
from fastapi.responses import FileResponse
from numpy.typing import NDArray

from foreshock import comparisons, rollouts
from foreshock.api import records, runs
from foreshock.api.steps import TokensRecord
from foreshock.rollouts import parquet_files, schema
from foreshock_service.platform import columnar, parameters, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.runs import attempts, chosen_tokens, curves, events, measurements, shards, steps

router = parameters.api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["rollouts"])

LARGEST_POSITION = 2**31 - 1
LONGEST_SAMPLE_ID = 1024
_EVERY_COLUMN = tuple(column.name for column in schema.ROLLOUT_COLUMNS)


class RolloutNotFound(problem.ProblemError, status=404, problem_type="rollout-not-found"):
    """Missing rollout: the step has none with that sample id."""


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
    coverage: runs.Coverage
    incomplete: runs.IncompleteStep | None
    table: columnar.ColumnTable

    def log_probs(self, scorer: str) -> NDArray[np.float32]:
        """Return the log-prob of each token by a scorer, NaN if it is missing."""
        return self.table.array(chosen_tokens.LOG_PROB + scorer)


@router.get("/tokens", response_model=TokensRecord, responses=columnar.FORMATS)
def read_tokens(
    asked: attempts.StepOfRequest,
    request: Request,
    comparison: curves.Comparison = comparisons.TRAINER_ROLLOUT,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest |d| first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="last, of a rollout")] = LARGEST_POSITION,
    format_name: columnar.Format = None,
) -> Response:
    """Return the worst tokens of a step, or one rollout token by token, with each scorer's log-prob.

    CSV and Parquet have a row for each token, and of each scorer a column `log_prob.` with its name.
    """
    media_type = columnar.choose_format(request.headers.get("accept"), format_name)
    query = TokenQuery(asked.run, asked.step, asked.attempt, comparison, worst, sample_id, from_position, to_position)
    found = find_tokens(asked.context, asked.principal, query)
    body = _tokens_json(found) if media_type == columnar.JSON_MEDIA_TYPE else columnar.render(found.table, media_type)
    return columnar.columnar_response(request, body, media_type)


@router.get("/rollouts", response_class=FileResponse, responses=columnar.PARQUET_FILE)
def export_rollouts(asked: attempts.StepOfRequest) -> FileResponse:
    """Return every rollout of a step that is stored in full as one Parquet file, a row each, in the rollout table.

    A column that only some shards have is null in the others.
    """
    context = asked.context
    with context.database.read() as session:
        key = asked.key(session)
        files = shards.shards_with_tokens(session, key)
    if not files:
        raise RolloutNotFound(f"the run has no rollouts of step {key.step}")
    named = {"Content-Disposition": f'attachment; filename="step_{key.step}.parquet"'}
    return columnar.parquet_file(context.store, partial(_join, context, key, files), **named)


def _join(context: ServiceContext, key: events.StepKey, files: Sequence[Shard], joined: Path) -> None:
    with problem.stored_file(f"step {key.step}"), parquet_files.arrow_errors():
        schemas = []
        for each in files:
            with context.store.file(each.file).open() as source:
                schemas.append(pq.read_schema(source))
        schema = pa.unify_schemas(schemas)
        with pq.ParquetWriter(joined, schema, compression="zstd") as writer:
            for each in files:
                with context.store.file(each.file).open() as source:
                    shard = pq.ParquetFile(source)
                    for group in range(shard.num_row_groups):
                        rows = [schema.empty_table(), shard.read_row_group(group)]
                        writer.write_table(pa.concat_tables(rows, promote_options="default"))


def _tokens_json(found: FoundTokens) -> bytes:
    """Return the JSON of a `TokensRecord`; a model of each token takes thirty times as long."""
    columns = {name: column.tolist() for name, column in found.table.columns.items()}
    scores = [columns.pop(chosen_tokens.LOG_PROB + scorer) for scorer in found.scorers]
    items = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for place, item in enumerate(items):
        item["log_probs"] = {name: values[place] for name, values in zip(found.scorers, scores, strict=True)}
    # NaN and infinite values become null.
    return orjson.dumps(
        {
            "incomplete": records.to_json(found.incomplete) if found.incomplete is not None else None,
            "comparison": found.comparison,
            "step": found.step,
            "attempt": found.attempt,
            "sample_id": found.sample_id,
            "prompt_token_ids": found.prompt,
            "scorers": found.scorers,
            "coverage": records.to_json(found.coverage),
            "items": items,
        }
    )


def find_tokens(context: ServiceContext, principal: security.Principal, query: TokenQuery) -> FoundTokens:
    """Return the requested tokens.

    Raises UnknownComparison, RolloutNotFound, TokensPurged, AnswerTooLarge, and MeasurementNotFound if one of the
    scores is missing.
    """
    measurements.check_comparison(query.comparison)
    prompt: list[int] | None = None
    with context.database.read() as session:
        key = attempts.visible_step(session, principal, query.run_id, query.step, query.attempt)
        coverage = steps.coverage_of_step(session, key)
        incomplete = steps.incomplete_step(steps.find_step(session, key))
        files = shards.shards_with_tokens(session, key)
        if query.sample_id is None:
            rows = chosen_tokens.worst_tokens(context, session, key, files, query.comparison, query.worst)
            if rows is None:
                raise measurements.MeasurementNotFound(
                    f"step {query.step} of attempt {key.attempt} has no {query.comparison}"
                )
        else:
            found = find_rollout(context, key, files, query.sample_id)
            if found is None:
                raise rollout_not_found(key, query.sample_id, coverage)
            shard, batch = found
            prompt, scores = batch.prompt_token_ids.tolist(), chosen_tokens.scores_of(context, session, key, batch)
            d = chosen_tokens.difference(scores, query.comparison)
            d = np.full(batch.num_tokens, np.nan) if d is None else d
            tokens = np.arange(query.from_position, min(query.to_position + 1, batch.num_tokens))
            rows = chosen_tokens.table_of_tokens(batch, scores, d, tokens, shard)
    log_probs = sorted(name for name in rows.column_names if name.startswith(chosen_tokens.LOG_PROB))
    shown = ("sample_id", "shard", "position", "token_id", "generated", "d", *log_probs)
    table = columnar.ColumnTable({name: rows[name].to_numpy() for name in shown})
    if table.num_values > context.settings.max_answer_values:
        raise columnar.AnswerTooLarge(
            f"the answer has {table.num_values:,} values, more than the {context.settings.max_answer_values:,} of "
            "FORESHOCK_MAX_ANSWER_VALUES: ask for a part of the rollout (from_position, to_position)"
        )
    scorers = tuple(name.removeprefix(chosen_tokens.LOG_PROB) for name in log_probs)
    return FoundTokens(
        query.comparison, query.step, key.attempt, query.sample_id, prompt, scorers, coverage, incomplete, table
    )


def rollout_not_found(key: events.StepKey, sample_id: str, coverage: runs.Coverage) -> RolloutNotFound:
    among = "" if coverage.rests_on == "all tokens" else f" among the {coverage.text} that are stored in full"
    return RolloutNotFound(f"step {key.step} of attempt {key.attempt} has no rollout {sample_id!r}{among}")


def find_rollout(
    context: ServiceContext,
    key: events.StepKey,
    files: Sequence[Shard],
    sample_id: str,
    only: Collection[str] = chosen_tokens.TOKEN_COLUMNS,
) -> tuple[int, rollouts.RolloutBatch] | None:
    """Return (shard, the rollout) of the first shard that has it, with these columns; None if none does."""
    for file in files:
        with problem.stored_file(f"shard {file.shard} of step {key.step}"):
            group = parquet_files.find_rollouts(context.store.file(file.file), [sample_id], stored_limits(), only=only)
        if group is not None:
            return file.shard, group.select([group.sample_ids.index(sample_id)])
    return None


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A batch of this one rollout, and the log-prob of each response token by scorer, [T], NaN if it is missing."""

    attempt: int
    batch: rollouts.RolloutBatch
    scores: Mapping[str, NDArray[np.float32]]


def read_whole_rollout(
    context: ServiceContext, principal: security.Principal, run_id: str, step: int, sample_id: str
) -> WholeRollout:
    """Return a rollout of the active step. Raises RunNotFound, StepNotFound, RolloutNotFound, TokensPurged."""
    with context.database.read() as session:
        key = attempts.visible_step(session, principal, run_id, step, None)
        found = find_rollout(context, key, shards.shards_with_tokens(session, key), sample_id, _EVERY_COLUMN)
        if found is None:
            raise rollout_not_found(key, sample_id, steps.coverage_of_step(session, key))
        _, batch = found
        return WholeRollout(key.attempt, batch, chosen_tokens.scores_of(context, session, key, batch))
