"""The exact divergences at single tokens: the largest of a step, or all of one rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshock.json_values import finite_or_none
from foreshock.rollouts import ExactBatch, RolloutBatch
from service.platform.context import ServiceContext
from service.platform.security import Principal
from service.platform.store.reading import TokensPurged, stored_file
from service.replay.exact import repository
from service.replay.exact.files import align_exact, read_exact
from service.replay.exact.schemas import ExactToken, ExactTokensRead
from service.replay.exact.service import ExactNotFound, newest_exact
from service.replay.probes.pinned_rollouts import read_rollouts
from service.replay.probes.service import rollouts_of_step
from service.runs.attempts.service import resolve_step
from service.runs.rollouts.tokens import RolloutNotFound
from service.runs.runs.service import get_run


@dataclass(frozen=True, slots=True)
class ExactTokenQuery:
    """Request for tokens: the `worst` of a step by KL(μ‖π), or all of one rollout if `sample_id` is given."""

    run_id: str
    step: int
    attempt: int | None
    pair: str
    worst: int
    sample_id: str | None


def read_exact_tokens(context: ServiceContext, principal: Principal, query: ExactTokenQuery) -> ExactTokensRead:
    """Return the requested tokens. Raises ExactNotFound, RolloutNotFound, RunNotFound, RunDeleted."""
    with context.database.read() as session:
        get_run(session, principal, query.run_id)
        key = resolve_step(session, query.run_id, query.step, query.attempt)
        row = next((each for each in newest_exact(session, key) if each.pair == query.pair), None)
        if row is None:
            raise ExactNotFound(f"no exact divergences of {query.pair} are published at step {query.step}")
        files = [context.store.file(shard.file) for shard in repository.shards_of(session, row)]
        rollouts = rollouts_of_step(context, session, key)
        if not files:
            raise TokensPurged(f"the exact divergences of step {key.step} at single tokens were purged by retention")
    with stored_file(f"step {key.step}, or of its exact divergences,"):
        batch = read_rollouts(rollouts)
        exact = align_exact(batch, [read_exact(file) for file in files])
    if query.sample_id is None:
        sizes = np.where(np.isfinite(exact.kl) & batch.generated, exact.kl, -1.0)
        order = np.argsort(-sizes, kind="stable")[: query.worst]
        positions = [int(position) for position in order if sizes[position] >= 0.0]
    elif query.sample_id in batch.sample_ids:
        number = batch.sample_ids.index(query.sample_id)
        positions = list(range(*(int(offset) for offset in batch.response_offsets[number : number + 2])))
    else:
        raise RolloutNotFound(f"step {key.step} of attempt {key.attempt} has no rollout {query.sample_id!r}")
    return ExactTokensRead(
        pair=query.pair,
        step=key.step,
        attempt=key.attempt,
        sample_id=query.sample_id,
        items=[_token(batch, exact, position) for position in positions],
    )


def _token(batch: RolloutBatch, exact: ExactBatch, position: int) -> ExactToken:
    row = int(np.searchsorted(batch.response_offsets, position, side="right")) - 1
    return ExactToken(
        sample_id=batch.sample_ids[row],
        position=position - int(batch.response_offsets[row]),
        token_id=int(batch.response_token_ids[position]),
        kl=finite_or_none(float(exact.kl[position])),
        reverse_kl=finite_or_none(float(exact.reverse_kl[position])),
        tv=finite_or_none(float(exact.tv[position])),
        top1_flip=bool(exact.top1_flip[position]),
        target_entropy=finite_or_none(float(exact.target_entropy[position])),
        behaviour_entropy=finite_or_none(float(exact.behaviour_entropy[position])),
        target_log_prob=finite_or_none(float(exact.target_log_probs[position])),
        behaviour_log_prob=finite_or_none(float(exact.behaviour_log_probs[position])),
    )
