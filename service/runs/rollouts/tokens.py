"""Single tokens from the store: the worst of a step, or all tokens of one rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.comparisons import split_comparison
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.rollouts.parquet_row_groups import find_rollouts
from service.platform.columnar.reading import AnswerTooLarge
from service.platform.columnar.table import Column, ColumnTable, Labels
from service.platform.context import ScoredShard, ServiceContext
from service.platform.database.tables import Shard, Step
from service.platform.decoding.limits import stored_limits
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.platform.store.reading import stored_file
from service.platform.store.tokens import StoredFile
from service.runs.attempts.service import resolve_step
from service.runs.coverage.schemas import CoverageRead
from service.runs.coverage.service import coverage_of_step
from service.runs.measurements.names import check_comparison
from service.runs.measurements.service import MeasurementNotFound
from service.runs.rollouts.service import shards_with_tokens
from service.runs.runs.service import get_run
from service.runs.shard_counts import incomplete_step
from service.runs.shard_schemas import IncompleteStep

Scores = Mapping[str, NDArray[np.float32]]
LARGEST_POSITION = 2**31 - 1
_LOG_PROB = "log_prob."


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
    coverage: CoverageRead
    incomplete: IncompleteStep | None
    table: ColumnTable

    def log_probs(self, scorer: str) -> NDArray[np.float32]:
        """Return the log-prob of each token by a scorer, NaN if it is missing."""
        return self.table.array(_LOG_PROB + scorer)


def read_tokens(context: ServiceContext, principal: Principal, query: TokenQuery) -> FoundTokens:
    """Return the requested tokens.

    Raises UnknownComparison, RolloutNotFound, TokensPurged, AnswerTooLarge, and MeasurementNotFound if one of the
    scores is missing.
    """
    check_comparison(query.comparison)
    target, behaviour = split_comparison(query.comparison)
    with context.database.read() as session:
        get_run(session, principal, query.run_id)
        key = resolve_step(session, query.run_id, query.step, query.attempt)
        coverage = coverage_of_step(session, key)
        incomplete = incomplete_step(session.get(Step, tuple(key)))
        shards = shards_with_tokens(session, key)
        chosen = _ChosenTokens(target, behaviour)
        for shard, batch, scores in _read_shards(context, session, shards, query.sample_id):
            chosen.add(shard, batch, scores, query)
    if query.sample_id is not None and not chosen.parts:
        among = "" if coverage.rests_on == "all tokens" else f" among the {coverage.text} that are stored in full"
        raise RolloutNotFound(f"step {query.step} of attempt {key.attempt} has no rollout {query.sample_id!r}{among}")
    if not chosen.compared and query.sample_id is None:
        raise MeasurementNotFound(f"step {query.step} of attempt {key.attempt} has no {query.comparison}")
    scorers = tuple(sorted(chosen.scorers))
    found = chosen.table(scorers)
    if query.sample_id is None:
        # Stable: of equal values, the earlier shard and position come first.
        found = found.rows(np.argsort(-np.abs(found.array("d")), kind="stable")[: query.worst])
    if found.num_values > context.settings.max_answer_values:
        raise AnswerTooLarge(
            f"the answer has {found.num_values:,} values, more than the {context.settings.max_answer_values:,} of "
            "FORESHOCK_MAX_ANSWER_VALUES: ask for a part of the rollout (from_position, to_position)"
        )
    prompt = chosen.prompt if query.sample_id is not None else None
    return FoundTokens(
        query.comparison, query.step, key.attempt, query.sample_id, prompt, scorers, coverage, incomplete, found
    )


class _ChosenTokens:
    """Tokens chosen from the shards read so far."""

    def __init__(self, target: str, behaviour: str) -> None:
        self._target, self._behaviour = target, behaviour
        self.scorers: set[str] = set()
        self.compared = False
        self.parts: list[dict[str, Any]] = []
        self.prompt: list[int] = []

    def add(self, shard: int, batch: RolloutBatch, scores: Scores, query: TokenQuery) -> None:
        """Add the worst tokens of a shard, or those of the one rollout in `batch`."""
        self.scorers |= scores.keys()
        d = self._difference(scores, batch.num_tokens)
        if query.sample_id is None:
            positions = _largest(np.where(np.isfinite(d) & batch.generated, np.abs(d), -1.0), query.worst)
        else:
            positions = np.arange(query.from_position, min(query.to_position + 1, batch.num_tokens))
            self.prompt = batch.prompt_token_ids.tolist()
        rows = np.searchsorted(batch.response_offsets, positions, side="right") - 1
        self.parts.append(
            {
                "sample_id": [batch.sample_ids[row] for row in rows.tolist()],
                "shard": np.full(positions.size, shard),
                "position": positions - batch.response_offsets[rows],
                "token_id": batch.response_token_ids[positions],
                "generated": batch.generated[positions],
                "d": d[positions],
                **{_LOG_PROB + name: values[positions] for name, values in scores.items()},
            }
        )

    def table(self, scorers: Sequence[str]) -> ColumnTable:
        """Return the tokens of all parts, with a column for each of `scorers`."""
        names = [name for part in self.parts for name in part["sample_id"]]
        codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        columns: dict[str, Column] = {
            "sample_id": Labels(np.array([codes[name] for name in names], dtype=np.int32), tuple(codes))
        }
        for column in ("shard", "position", "token_id", "generated", "d", *(_LOG_PROB + name for name in scorers)):
            columns[column] = np.concatenate([_values(part, column) for part in self.parts])
        return ColumnTable(columns)

    def _difference(self, scores: Scores, tokens: int) -> NDArray[np.float64]:
        if self._target not in scores or self._behaviour not in scores:
            return np.full(tokens, np.nan)
        self.compared = True
        with np.errstate(invalid="ignore"):
            return scores[self._target].astype(np.float64) - scores[self._behaviour].astype(np.float64)


def _values(part: dict[str, Any], column: str) -> NDArray[Any]:
    missing: NDArray[Any] = np.full(len(part["sample_id"]), np.nan, dtype=np.float32)
    values: NDArray[Any] = part.get(column, missing)
    return values


def _read_shards(
    context: ServiceContext, session: Session, shards: Sequence[Shard], sample_id: str | None
) -> Iterator[tuple[int, RolloutBatch, Scores]]:
    """Yield the shards with all their scores; if `sample_id` is given, this rollout only."""
    for shard in shards:
        with stored_file(f"shard {shard.shard} of step {shard.step}"):
            batch = read_stored_rollouts(context.store.file(shard.file), sample_id)
        if batch is None:
            continue
        key = ScoredShard(shard.run_id, shard.attempt, shard.step, batch)
        scores: dict[str, NDArray[np.float32]] = {}
        if batch.rollout_log_probs is not None:
            scores["rollout"] = batch.rollout_log_probs
        if batch.trainer_log_probs is not None:
            scores["trainer"] = batch.trainer_log_probs
        for read_scores in context.score_readers:
            scores |= read_scores(session, context.store, key)
        yield shard.shard, batch, scores
        if sample_id is not None:
            return


def read_stored_rollouts(file: StoredFile, sample_id: str | None) -> RolloutBatch | None:
    """Return the rollouts of a stored file, or the one with this sample id; None if the file has none with it."""
    if sample_id is None:
        return decode_rollouts(file.read_bytes(), stored_limits())
    found = find_rollouts(file, [sample_id], stored_limits())
    return None if found is None else found.select([found.sample_ids.index(sample_id)])


def _largest(sizes: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest non-negative sizes, largest first; ties in order of index."""
    at_least = np.partition(sizes, -most)[-most] if most < sizes.size else 0.0
    # Several sizes may equal the smallest one kept; the stable sort keeps the first of them.
    candidates = np.flatnonzero(sizes >= max(at_least, 0.0))
    order = np.argsort(-sizes[candidates], kind="stable")[:most]
    return candidates[order]
