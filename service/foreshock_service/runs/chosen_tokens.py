"""Tokens of a step, chosen while its rollouts are read one row group at a time: the worst by |d|, or a random sample.

d = log target − log behaviour. The summary of a rollout has its smallest and largest d, which bound |d| of its tokens.
For the worst tokens the row group with the largest bound is read first, until no other can hold a token as bad as the
worst that were found. Without summaries of the comparison all row groups are read.

For a sample, row groups of a few files are read in random order until they have enough tokens; the sample is drawn from
these. Drawing from all tokens would read every file of the step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from foreshock import comparisons, rollouts
from foreshock.api.runs import Coverage
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import parquet_files, schema
from foreshock.rollouts.arrays import rows_of_positions
from foreshock_service.platform import problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.runs import attempts, events, measurements, shards, steps

Scores = Mapping[str, NDArray[np.float32]]
LOG_PROB = "log_prob."
TOKEN_COLUMNS = (
    "sample_id", "prompt_token_ids", "response_token_ids", "response_mask", "rollout_log_probs", "trainer_log_probs"
)  # fmt: skip
"""The columns that are read to show the tokens of rollouts."""

# Logged scores, and their columns. Replayed ones may be newer than the summaries.
_LOGGED = {"rollout": "rollout_log_probs", "trainer": "trainer_log_probs"}
# Sums of log-probs are taken in another order than differences of single tokens.
_ROUNDING = 1e-9
# Of equal |d|, the earlier shard, row group and token come first.
_WORST_FIRST = [("size", "descending"), ("shard", "ascending"), ("group", "ascending"), ("token", "ascending")]


def scores_of(context: ServiceContext, session: Session, key: events.StepKey, batch: rollouts.RolloutBatch) -> Scores:
    """Return every score of the rollouts by name, [T]: the logged ones and those of probes."""
    scores = {name: values for name, column in _LOGGED.items() if (values := getattr(batch, column)) is not None}
    return scores | dict(context.replayed_scores(session, context.store, key, batch))


def difference(scores: Scores, comparison: str) -> NDArray[np.float64] | None:
    """Return d of each token, [T]; None without one of the two scores."""
    target, behaviour = comparisons.split_comparison(comparison)
    if target not in scores or behaviour not in scores:
        return None
    with np.errstate(invalid="ignore"):
        return scores[target].astype(np.float64) - scores[behaviour].astype(np.float64)


def table_of_tokens(
    batch: rollouts.RolloutBatch,
    scores: Scores,
    d: NDArray[np.float64],
    tokens: NDArray[np.int64],
    shard: int,
    group: int = 0,
) -> pa.Table:
    """Return a row for each of these tokens of a row group, with a column `log_prob.` of each scorer."""
    rows = rows_of_positions(batch.response_offsets, tokens)
    return pa.table(
        {
            "sample_id": pa.array(batch.sample_ids, pa.string()).take(rows),
            "shard": np.full(tokens.size, shard),
            "group": np.full(tokens.size, group),
            "token": tokens,
            "position": tokens - batch.response_offsets[rows],
            "token_id": batch.response_token_ids[tokens],
            "generated": batch.generated[tokens],
            "d": d[tokens],
            "size": np.abs(d[tokens]),
            **{LOG_PROB + name: values[tokens] for name, values in scores.items()},
        }
    )


def worst_tokens(
    context: ServiceContext, session: Session, key: events.StepKey, files: Sequence[Shard], comparison: str, most: int
) -> pa.Table | None:
    """Return the `most` tokens with the largest |d|, largest first; None if the step has no such comparison.

    Files without a column that is compared are not read, and no further group if a replayed score does not exist.
    Raises TokensGone, TokensDamaged.
    """
    bounds = _bounds_of_rollouts(session, key, comparison)
    compared = {_LOGGED[each] for each in comparisons.split_comparison(comparison) if each in _LOGGED}
    opened = {file.shard: _opened(context, key, file) for file in files}
    order = [
        (-max((bounds.get(name, math.inf) for name in names), default=-math.inf), shard, group)
        for shard, file in opened.items()
        if compared <= file.column_names
        for group, names in enumerate(file.sample_ids)
    ]
    found: pa.Table | None = None
    for negative_bound, shard, group in sorted(order):
        if found is not None and found.num_rows == most and -negative_bound < found["size"][-1].as_py():
            break
        batch = _read(opened, key, shard, group)
        scores = scores_of(context, session, key, batch)
        d = difference(scores, comparison)
        if d is None and found is None:
            break
        if d is not None:
            tokens = _largest(np.where(np.isfinite(d) & batch.generated, np.abs(d), -1.0), most)
            parts = [*([] if found is None else [found]), table_of_tokens(batch, scores, d, tokens, shard, group)]
            found = pa.concat_tables(parts, promote_options="default").sort_by(_WORST_FIRST).slice(0, most)
    return found


def _largest(sizes: NDArray[np.floating[Any]], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest non-negative sizes, and of those that equal the smallest of these."""
    at_least = np.partition(sizes, -most)[-most] if most < sizes.size else 0.0
    return np.flatnonzero(sizes >= max(at_least, 0.0))


def _opened(context: ServiceContext, key: events.StepKey, file: Shard) -> parquet_files.RolloutFile:
    with problem.stored_file(f"shard {file.shard} of step {key.step}"):
        return parquet_files.RolloutFile(context.store.file(file.file), stored_limits(), only=TOKEN_COLUMNS)


def _read(
    opened: Mapping[int, parquet_files.RolloutFile], key: events.StepKey, shard: int, group: int
) -> rollouts.RolloutBatch:
    with problem.stored_file(f"shard {shard} of step {key.step}"):
        return opened[shard].read(group)


def _bounds_of_rollouts(session: Session, key: events.StepKey, comparison: str) -> dict[str, float]:
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
    drawn: list[tuple[NDArray[np.float32], NDArray[np.float64]]] = []
    drawn_from = groups_read = 0
    with context.database.read() as session:
        key = attempts.visible_step(session, principal, run_id, step, attempt)
        coverage = steps.coverage_of_step(session, key)
        random = np.random.default_rng(list("/".join(map(str, key)).encode()))
        files = shards.shards_with_tokens(session, key)
        # Opening a file reads all its sample ids.
        chosen = sorted(random.permutation(len(files))[:MOST_GROUPS_READ].tolist())
        opened = {files[at].shard: _opened(context, key, files[at]) for at in chosen}
        groups = [(shard, group) for shard, file in opened.items() for group in range(len(file.sample_ids))]
        for at in random.permutation(len(groups))[:MOST_GROUPS_READ].tolist():
            if drawn_from >= ENOUGH_TOKENS:
                break
            batch = _read(opened, key, *groups[at])
            groups_read += 1
            scores = scores_of(context, session, key, batch)
            d = difference(scores, comparison)
            if d is not None:
                known = schema.are_log_probs(scores[target]) & schema.are_log_probs(scores[behaviour])
                usable = batch.generated & known
                drawn_from += int(usable.sum())
                drawn.append((scores[behaviour][usable], d[usable]))
    if not drawn:
        raise measurements.MeasurementNotFound(f"step {step} of attempt {key.attempt} has no {comparison}")
    kept = random.permutation(drawn_from)[:most]
    log_behaviour, differences = (np.concatenate(each)[kept] for each in zip(*drawn, strict=True))
    is_all_read = len(opened) == len(files) and groups_read == len(groups)
    return TokenSample(log_behaviour, differences, drawn_from, groups_read, is_all_read, coverage)
