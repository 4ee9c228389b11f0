"""Choose tokens of a step while its rollouts are read in parts: of one rollout, the worst by |d|, or a random sample.

The summary of a rollout has its smallest and largest d, which bound |d| of its tokens. Row groups are read one at a
time, the largest bound first, until no other group can hold a token as bad as the worst that were found. Without
summaries of the comparison all row groups are read, still one at a time.

For a sample, row groups of a few files are read in random order until they have enough tokens; the sample is drawn from
these. Drawing from all tokens would read every file of the step.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock import comparisons, rollouts
from foreshock.api.runs import Coverage
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import parquet_files, schema
from foreshock_service.platform import columnar, problem, security
from foreshock_service.platform.context import ScoredShard, ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.runs import attempts, events, measurements, shards, steps

Scores = Mapping[str, NDArray[np.float32]]
LOG_PROB = "log_prob."
TOKEN_COLUMNS = (
    "sample_id", "prompt_token_ids", "response_token_ids", "response_mask", "rollout_log_probs", "trainer_log_probs"
)  # fmt: skip
"""The columns that are read to show the tokens of rollouts."""


class ChosenTokens:
    """Tokens chosen from the rollouts that were read so far; d = log target − log behaviour."""

    def __init__(self, target: str, behaviour: str) -> None:
        self._target, self._behaviour = target, behaviour
        self.columns = {_LOGGED[each] for each in (target, behaviour) if each in _LOGGED}
        """The columns of logged scores that are compared."""
        self.scorers: set[str] = set()
        self.compared = False
        self.parts: list[tuple[tuple[int, int], dict[str, Any]]] = []
        self.prompt: list[int] = []
        # Tokens with a smaller |d| are not among the worst.
        self.least = 0.0

    def add_rollout(self, shard: int, batch: rollouts.RolloutBatch, scores: Scores, first: int, last: int) -> None:
        """Add the tokens of the one rollout in `batch` at positions `first` … `last`."""
        self.prompt = batch.prompt_token_ids.tolist()
        d = self._difference(scores, batch.num_tokens)
        self._add((shard, 0), batch, scores, d, np.arange(first, min(last + 1, batch.num_tokens)))

    def add_worst(self, place: tuple[int, int], batch: rollouts.RolloutBatch, scores: Scores, most: int) -> None:
        """Add the tokens of `batch` that may be among the worst; `place` is (shard, row group).

        Of equal |d|, the earlier place and token come first, regardless of the order in which places are added.
        """
        d = self._difference(scores, batch.num_tokens)
        sizes = np.where(np.isfinite(d) & batch.generated, np.abs(d), -1.0)
        positions = largest(sizes, most)
        positions = positions[sizes[positions] >= self.least]
        self._add(place, batch, scores, d, positions)
        kept = np.sort(np.concatenate([np.abs(part["d"]) for _, part in self.parts]))
        if kept.size >= most:
            self.least = float(kept[-most])
            parts = [(place, _rows(part, np.abs(part["d"]) >= self.least)) for place, part in self.parts]
            self.parts = [each for each in parts if each[1]["sample_id"]]

    def table(self, scorers: Sequence[str]) -> columnar.ColumnTable:
        """Return the tokens of all parts in the order of their places, with a column for each of `scorers`."""
        parts = [part for _, part in sorted(self.parts, key=lambda each: each[0])]
        names = [name for part in parts for name in part["sample_id"]]
        columns: dict[str, columnar.Column] = {"sample_id": np.array(names, dtype=np.object_)}
        for column in ("shard", "position", "token_id", "generated", "d", *(LOG_PROB + name for name in scorers)):
            columns[column] = np.concatenate([_values(part, column) for part in parts])
        return columnar.ColumnTable(columns)

    def _add(
        self,
        place: tuple[int, int],
        batch: rollouts.RolloutBatch,
        scores: Scores,
        d: NDArray[np.float64],
        positions: NDArray[np.int64],
    ) -> None:
        self.scorers |= scores.keys()
        rows = np.searchsorted(batch.response_offsets, positions, side="right") - 1
        part = {
            "sample_id": [batch.sample_ids[row] for row in rows.tolist()],
            "shard": np.full(positions.size, place[0]),
            "position": positions - batch.response_offsets[rows],
            "token_id": batch.response_token_ids[positions],
            "generated": batch.generated[positions],
            "d": d[positions],
            **{LOG_PROB + name: values[positions] for name, values in scores.items()},
        }
        self.parts.append((place, part))

    def _difference(self, scores: Scores, tokens: int) -> NDArray[np.float64]:
        if self._target not in scores or self._behaviour not in scores:
            return np.full(tokens, np.nan)
        self.compared = True
        with np.errstate(invalid="ignore"):
            return scores[self._target].astype(np.float64) - scores[self._behaviour].astype(np.float64)


def largest(sizes: NDArray[np.floating[Any]], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest non-negative sizes, largest first; ties in order of index."""
    at_least = np.partition(sizes, -most)[-most] if most < sizes.size else 0.0
    # Several sizes may equal the smallest one kept; the stable sort keeps the first of them.
    candidates = np.flatnonzero(sizes >= max(at_least, 0.0))
    order = np.argsort(-sizes[candidates], kind="stable")[:most]
    return candidates[order]


def _rows(part: dict[str, Any], kept: NDArray[np.bool_]) -> dict[str, Any]:
    names = [name for name, stays in zip(part["sample_id"], kept.tolist(), strict=True) if stays]
    return {**{name: values[kept] for name, values in part.items() if name != "sample_id"}, "sample_id": names}


def _values(part: dict[str, Any], column: str) -> NDArray[Any]:
    missing: NDArray[Any] = np.full(len(part["sample_id"]), np.nan, dtype=np.float32)
    values: NDArray[Any] = part.get(column, missing)
    return values


# Logged scores, and their columns. Replayed ones may be newer than the summaries.
_LOGGED = {"rollout": "rollout_log_probs", "trainer": "trainer_log_probs"}
# Sums of log-probs are taken in another order than differences of single tokens.
_ROUNDING = 1e-9


def read_worst_first(
    context: ServiceContext,
    key: events.StepKey,
    files: Sequence[Shard],
    bounds: Mapping[str, float],
    so_far: ChosenTokens,
) -> Iterator[tuple[tuple[int, int], rollouts.RolloutBatch]]:
    """Yield ((shard, row group), rollouts) until no other row group can add to `so_far`.

    Files without a column that is compared are not read, and no further group if a replayed score does not exist.
    `bounds` has a bound on |d| by sample id; other rollouts have no known bound. Raises TokensGone, TokensDamaged.
    """
    opened: dict[int, parquet_files.RolloutFile] = {}
    order: list[tuple[float, int, int]] = []
    for file in files:
        with problem.stored_file(f"shard {file.shard} of step {key.step}"):
            opened[file.shard] = parquet_files.RolloutFile(
                context.store.file(file.file), stored_limits(), only=TOKEN_COLUMNS
            )
        if not so_far.columns <= opened[file.shard].column_names:
            continue
        for group, names in enumerate(opened[file.shard].sample_ids):
            bound = max((bounds.get(name, math.inf) for name in names), default=-math.inf)
            order.append((-bound, file.shard, group))
    for place, (negative_bound, shard, group) in enumerate(sorted(order)):
        # The first one is always read: it shows which scores exist.
        if place and (-negative_bound < so_far.least or not so_far.compared):
            return
        with problem.stored_file(f"shard {shard} of step {key.step}"):
            batch = opened[shard].read(group)
        yield (shard, group), batch


def bounds_of_rollouts(session: Session, key: events.StepKey, comparison: str) -> dict[str, float]:
    """Return an upper bound of |d| over each rollout's tokens, by sample id, for rollouts with a summary."""
    if not _LOGGED.keys() >= set(comparison.split("/")):
        return {}
    stored = measurements.blobs_of_steps(session, [key], comparison, "summaries").get(key)
    if stored is None:
        return {}
    summaries = RolloutSummaries.from_bytes(stored)
    sizes = np.fmax(np.abs(summaries.column("min_d")), np.abs(summaries.column("max_d")))
    # A rollout without a measured token has none of the worst tokens.
    sizes = np.where(np.isnan(sizes), -math.inf, sizes * (1.0 + _ROUNDING) + _ROUNDING)
    bounds: dict[str, float] = {}
    for name, size in zip(summaries.table.column("sample_id").to_pylist(), sizes.tolist(), strict=True):
        # Two shards may have rollouts with the same id.
        bounds[name] = max(size, bounds.get(name, -math.inf))
    return bounds


def scores_of(context: ServiceContext, session: Session, key: events.StepKey, batch: rollouts.RolloutBatch) -> Scores:
    """Return every score of the rollouts by name, [T]: the logged ones and those of probes."""
    scores: dict[str, NDArray[np.float32]] = {}
    if batch.rollout_log_probs is not None:
        scores["rollout"] = batch.rollout_log_probs
    if batch.trainer_log_probs is not None:
        scores["trainer"] = batch.trainer_log_probs
    shard = ScoredShard(key.run_id, key.attempt, key.step, batch)
    for read_scores in context.score_readers:
        scores |= read_scores(session, context.store, shard)
    return scores


MOST_SAMPLED = 2000
MOST_GROUPS_READ = 8
ENOUGH_TOKENS = 50_000
"""No further row group is read if there are this many tokens to draw from."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Model-generated tokens with two finite log-probs, [S], in random order.

    `log_behaviour`: log μ in nats. `d` = log π − log μ in nats, float64. They were drawn from `drawn_from` tokens of
    `groups_read` row groups; `is_all_read`: those are all that are stored of the step.
    """

    comparison: str
    attempt: int
    log_behaviour: NDArray[np.float32]
    d: NDArray[np.float64]
    drawn_from: int
    groups_read: int
    is_all_read: bool
    coverage: Coverage


def sample_tokens(
    context: ServiceContext,
    principal: security.Principal,
    run_id: str,
    step: int,
    attempt: int | None,
    comparison: str,
    most: int = MOST_SAMPLED,
) -> TokenSample:
    """Return at most `most` random tokens of a step; they are the same for each call with the same step.

    Raises UnknownComparison, StepNotFound, TokensPurged, and MeasurementNotFound if one of the scores is missing.
    """
    measurements.check_comparison(comparison)
    target, behaviour = comparisons.split_comparison(comparison)
    drawn_log_behaviour, drawn_d = [np.zeros(0, dtype=np.float32)], [np.zeros(0)]
    drawn_from = groups_read = 0
    is_compared = False
    with context.database.read() as session:
        key = attempts.visible_step(session, principal, run_id, step, attempt)
        coverage = steps.coverage_of_step(session, key)
        random = np.random.default_rng(_seed(key))
        opened, is_every_file = _some_files(context, key, shards.shards_with_tokens(session, key), random)
        groups = [(shard, group) for shard, found in opened.items() for group in range(len(found.sample_ids))]
        for at in random.permutation(len(groups))[:MOST_GROUPS_READ].tolist():
            if drawn_from >= ENOUGH_TOKENS:
                break
            shard, group = groups[at]
            with problem.stored_file(f"shard {shard} of step {step}"):
                batch = opened[shard].read(group)
            groups_read += 1
            scores = scores_of(context, session, key, batch)
            if target not in scores or behaviour not in scores:
                continue
            is_compared = True
            with np.errstate(invalid="ignore"):
                d = scores[target].astype(np.float64) - scores[behaviour].astype(np.float64)
            usable = batch.generated & schema.are_log_probs(scores[target]) & schema.are_log_probs(scores[behaviour])
            drawn_from += int(usable.sum())
            drawn_log_behaviour.append(scores[behaviour][usable])
            drawn_d.append(d[usable])
    if not is_compared:
        raise measurements.MeasurementNotFound(f"step {step} of attempt {key.attempt} has no {comparison}")
    kept = random.permutation(drawn_from)[:most]
    return TokenSample(
        comparison,
        key.attempt,
        np.concatenate(drawn_log_behaviour)[kept],
        np.concatenate(drawn_d)[kept],
        drawn_from,
        groups_read,
        is_every_file and groups_read == len(groups),
        coverage,
    )


def _some_files(
    context: ServiceContext, key: events.StepKey, files: Sequence[Shard], random: np.random.Generator
) -> tuple[dict[int, parquet_files.RolloutFile], bool]:
    """Open at most MOST_GROUPS_READ of the files; return them by shard, and whether those are all files."""
    opened: dict[int, parquet_files.RolloutFile] = {}
    # Opening a file reads all its sample ids.
    for at in sorted(random.permutation(len(files))[:MOST_GROUPS_READ].tolist()):
        file = files[at]
        with problem.stored_file(f"shard {file.shard} of step {key.step}"):
            opened[file.shard] = parquet_files.RolloutFile(
                context.store.file(file.file), stored_limits(), only=TOKEN_COLUMNS
            )
    return opened, len(opened) == len(files)


def _seed(key: events.StepKey) -> int:
    """Return a seed that depends on nothing but the step."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "big")
