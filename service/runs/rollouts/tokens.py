"""Single tokens from the store: the worst of a step, or all tokens of one rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock.comparisons import split_comparison
from foreshock.json_values import finite_or_none
from foreshock.rollouts import RolloutBatch, decode_rollouts
from service.platform.context import ScoredShard, ServiceContext
from service.platform.database.tables import Shard
from service.platform.decoding.limits import stored_limits
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.platform.store.reading import stored_file
from service.runs.attempts.service import resolve_step
from service.runs.coverage.service import coverage_of_step
from service.runs.measurements.names import check_comparison
from service.runs.measurements.service import MeasurementNotFound
from service.runs.rollouts.schemas import TokenRow, TokensRead
from service.runs.rollouts.service import shards_with_tokens
from service.runs.runs.service import get_run

Scores = Mapping[str, NDArray[np.float32]]


class RolloutNotFound(ProblemError):
    """Missing rollout: the step has none with that sample id."""

    status = 404
    problem_type = "rollout-not-found"


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """Request for tokens: the `worst` of a step by |d|, or all of one rollout if `sample_id` is given."""

    run_id: str
    step: int
    attempt: int | None
    comparison: str
    worst: int
    sample_id: str | None


def read_tokens(context: ServiceContext, principal: Principal, query: TokenQuery) -> TokensRead:
    """Return the requested tokens.

    Raises UnknownComparison, RolloutNotFound, TokensPurged, and MeasurementNotFound if one of the scores is missing.
    """
    check_comparison(query.comparison)
    target, behaviour = split_comparison(query.comparison)
    with context.database.read() as session:
        get_run(session, principal, query.run_id)
        key = resolve_step(session, query.run_id, query.step, query.attempt)
        coverage = coverage_of_step(session, key)
        parts = _read_shards(context, session, shards_with_tokens(session, key), query.sample_id)
        found = _FoundTokens(target, behaviour)
        for shard, batch, scores in parts:
            found.add(shard, batch, scores, query)
    if query.sample_id is not None and found.rollout is None:
        among = "" if coverage.rests_on == "all tokens" else f" among the {coverage.text} that are stored in full"
        raise RolloutNotFound(f"step {query.step} of attempt {key.attempt} has no rollout {query.sample_id!r}{among}")
    if not found.compared and query.sample_id is None:
        raise MeasurementNotFound(f"step {query.step} of attempt {key.attempt} has no {query.comparison}")
    return TokensRead(
        comparison=query.comparison,
        step=query.step,
        attempt=key.attempt,
        sample_id=query.sample_id,
        prompt_token_ids=found.prompt,
        scorers=sorted(found.scorers),
        coverage=coverage,
        items=found.rows(),
    )


class _FoundTokens:
    """Tokens found in the shards read so far."""

    def __init__(self, target: str, behaviour: str) -> None:
        self._target, self._behaviour = target, behaviour
        self._worst: list[tuple[float, TokenRow]] = []
        self.scorers: set[str] = set()
        self.compared = False
        self.rollout: list[TokenRow] | None = None
        self.prompt: list[int] | None = None

    def add(self, shard: int, batch: RolloutBatch, scores: Scores, query: TokenQuery) -> None:
        """Add the tokens of one shard."""
        self.scorers |= scores.keys()
        d = self._difference(scores, batch.num_tokens)
        if query.sample_id is not None:
            row = batch.sample_ids.index(query.sample_id)
            start, end = (int(position) for position in batch.response_offsets[row : row + 2])
            self.rollout = [_token(shard, batch, scores, d, row, position) for position in range(start, end)]
            first, last = (int(position) for position in batch.prompt_offsets[row : row + 2])
            self.prompt = batch.prompt_token_ids[first:last].tolist()
            return
        sizes = np.where(np.isfinite(d) & batch.generated, np.abs(d), -1.0)
        for position in _largest(sizes, query.worst):
            row = int(np.searchsorted(batch.response_offsets, position, side="right")) - 1
            token = _token(shard, batch, scores, d, row, position)
            self._worst.append((float(sizes[position]), token))
        # Stable sort: of equal values, the earlier shard and position come first.
        self._worst = sorted(self._worst, key=lambda each: -each[0])[: query.worst]

    def rows(self) -> list[TokenRow]:
        """Return the tokens to show, in order of position or of decreasing |d|."""
        if self.rollout is not None:
            return self.rollout
        return [token for _, token in self._worst]

    def _difference(self, scores: Scores, tokens: int) -> NDArray[np.float64]:
        if self._target not in scores or self._behaviour not in scores:
            return np.full(tokens, np.nan)
        self.compared = True
        with np.errstate(invalid="ignore"):
            return scores[self._target].astype(np.float64) - scores[self._behaviour].astype(np.float64)


def _read_shards(
    context: ServiceContext, session: Session, shards: Sequence[Shard], sample_id: str | None
) -> Iterator[tuple[int, RolloutBatch, Scores]]:
    """Yield the shards with all their scores; only the one that holds `sample_id`, if it is given."""
    for shard in shards:
        file = context.store.file(shard.file)
        with stored_file(f"shard {shard.shard} of step {shard.step}"):
            if sample_id is not None:
                with file.open() as opened:
                    names = pq.read_table(opened, columns=["sample_id"]).column("sample_id").to_pylist()
                if sample_id not in names:
                    continue
            batch = decode_rollouts(file.read_bytes(), stored_limits())
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


def _largest(sizes: NDArray[np.float64], most: int) -> list[int]:
    """Return the indices of the `most` largest non-negative sizes, largest first; ties in order of index."""
    at_least = np.partition(sizes, -most)[-most] if most < sizes.size else 0.0
    # Several sizes may equal the smallest one kept; the stable sort keeps the first of them.
    candidates = np.flatnonzero(sizes >= max(at_least, 0.0))
    order = np.argsort(-sizes[candidates], kind="stable")[:most]
    return [int(position) for position in candidates[order]]


def _token(
    shard: int, batch: RolloutBatch, scores: Scores, d: NDArray[np.float64], row: int, position: int
) -> TokenRow:
    return TokenRow(
        sample_id=batch.sample_ids[row],
        shard=shard,
        position=position - int(batch.response_offsets[row]),
        token_id=int(batch.response_token_ids[position]),
        generated=batch.response_mask is None or bool(batch.response_mask[position]),
        d=finite_or_none(float(d[position])),
        log_probs={name: finite_or_none(float(values[position])) for name, values in sorted(scores.items())},
    )
