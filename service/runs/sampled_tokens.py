"""A random sample of the tokens of a step, from a bounded part of its files.

A few files are opened, whole row groups of them are read in a random order until they have enough tokens, and tokens
are drawn from those. Drawing from all tokens would read every file of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.api.runs import Coverage
from foreshock.comparisons import split_comparison
from foreshock.rollouts.parquet_files import RolloutFile
from foreshock.rollouts.schema import are_log_probs
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.problem import stored_file
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts import resolve_step
from foreshock_service.runs.chosen_tokens import TOKEN_COLUMNS, scores_of
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.measurements import MeasurementNotFound, check_comparison
from foreshock_service.runs.runs import get_run
from foreshock_service.runs.shards import shards_with_tokens
from foreshock_service.runs.steps import coverage_of_step

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
    principal: Principal,
    run_id: str,
    step: int,
    attempt: int | None,
    comparison: str,
    most: int = MOST_SAMPLED,
) -> TokenSample:
    """Return at most `most` tokens of a step, the same ones whenever the same step is asked for.

    Raises UnknownComparison, StepNotFound, TokensPurged, and MeasurementNotFound if one of the scores is missing.
    """
    check_comparison(comparison)
    target, behaviour = split_comparison(comparison)
    drawn_log_behaviour, drawn_d = [np.zeros(0, dtype=np.float32)], [np.zeros(0)]
    drawn_from = groups_read = 0
    is_compared = False
    with context.database.read() as session:
        get_run(session, principal, run_id)
        key = resolve_step(session, run_id, step, attempt)
        coverage = coverage_of_step(session, key)
        random = np.random.default_rng(_seed(key))
        opened, is_every_file = _some_files(context, key, shards_with_tokens(session, key), random)
        groups = [(shard, group) for shard, found in opened.items() for group in range(len(found.sample_ids))]
        for at in random.permutation(len(groups))[:MOST_GROUPS_READ].tolist():
            if drawn_from >= ENOUGH_TOKENS:
                break
            shard, group = groups[at]
            with stored_file(f"shard {shard} of step {step}"):
                batch = opened[shard].read(group)
            groups_read += 1
            scores = scores_of(context, session, key, batch)
            if target not in scores or behaviour not in scores:
                continue
            is_compared = True
            with np.errstate(invalid="ignore"):
                d = scores[target].astype(np.float64) - scores[behaviour].astype(np.float64)
            usable = batch.generated & are_log_probs(scores[target]) & are_log_probs(scores[behaviour])
            drawn_from += int(usable.sum())
            drawn_log_behaviour.append(scores[behaviour][usable])
            drawn_d.append(d[usable])
    if not is_compared:
        raise MeasurementNotFound(f"step {step} of attempt {key.attempt} has no {comparison}")
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
    context: ServiceContext, key: StepKey, files: Sequence[Shard], random: np.random.Generator
) -> tuple[dict[int, RolloutFile], bool]:
    """Return at most MOST_GROUPS_READ of the files by shard, opened, and whether those are all."""
    opened: dict[int, RolloutFile] = {}
    # Opening a file reads all its sample ids.
    for at in sorted(random.permutation(len(files))[:MOST_GROUPS_READ].tolist()):
        file = files[at]
        with stored_file(f"shard {file.shard} of step {key.step}"):
            opened[file.shard] = RolloutFile(context.store.file(file.file), stored_limits(), only=TOKEN_COLUMNS)
    return opened, len(opened) == len(files)


def _seed(key: StepKey) -> int:
    """Return a seed that depends on nothing but the step."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "big")
