"""Single tokens from the store: the worst of a step, or one rollout with its tokens or with all that was logged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.api.runs import Coverage, IncompleteStep
from foreshock.comparisons import split_comparison
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.parquet_files import find_rollouts
from foreshock.rollouts.schema import ROLLOUT_COLUMNS
from foreshock_service.platform.columnar import AnswerTooLarge, ColumnTable
from foreshock_service.platform.context import ScoredShard, ServiceContext
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.problem import ProblemError, stored_file
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.coverage import coverage_of_step, incomplete_of_step
from foreshock_service.runs.measurements.curves import check_comparison
from foreshock_service.runs.measurements.service import MeasurementNotFound
from foreshock_service.runs.rollouts.chosen_tokens import (
    LOG_PROB,
    TOKEN_COLUMNS,
    ChosenTokens,
    Scores,
    bounds_of_rollouts,
    read_worst_first,
)
from foreshock_service.runs.rollouts.repository import StoredTokens
from foreshock_service.runs.rollouts.service import token_files
from foreshock_service.runs.runs.service import check_run, get_run
from foreshock_service.runs.step_key import StepKey

LARGEST_POSITION = 2**31 - 1
LONGEST_SAMPLE_ID = 1024


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


def read_tokens(context: ServiceContext, principal: Principal, query: TokenQuery) -> FoundTokens:
    """Return the requested tokens.

    Raises UnknownComparison, RolloutNotFound, TokensPurged, AnswerTooLarge, and MeasurementNotFound if one of the
    scores is missing.
    """
    check_comparison(query.comparison)
    target, behaviour = split_comparison(query.comparison)
    chosen = ChosenTokens(target, behaviour)
    with context.database.read() as session:
        check_run(session, principal, query.run_id)
        key = resolve_step(session, query.run_id, query.step, query.attempt)
        coverage = coverage_of_step(session, key)
        incomplete = incomplete_of_step(session, key)
        files = token_files(session, key)
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
    files: Sequence[StoredTokens],
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


def scores_of(context: ServiceContext, session: Session, key: StepKey, batch: RolloutBatch) -> Scores:
    """Return every score of the rollouts by name, [T]: those that they came with, and those of probes."""
    scores: dict[str, NDArray[np.float32]] = {}
    if batch.rollout_log_probs is not None:
        scores["rollout"] = batch.rollout_log_probs
    if batch.trainer_log_probs is not None:
        scores["trainer"] = batch.trainer_log_probs
    shard = ScoredShard(key.run_id, key.attempt, key.step, batch)
    for read_scores in context.score_readers:
        scores |= read_scores(session, context.store, shard)
    return scores


EVERY_COLUMN = tuple(column.name for column in ROLLOUT_COLUMNS)


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
        found = find_rollout(context, key, token_files(session, key), sample_id, EVERY_COLUMN)
        if found is None:
            raise rollout_not_found(key, sample_id, coverage_of_step(session, key))
        _, batch = found
        return WholeRollout(key.attempt, batch, scores_of(context, session, key, batch))
