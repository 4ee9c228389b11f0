"""The exact divergences at single tokens: the largest of a step, or all of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query

from foreshock.api.replays import ExactTokenRecord, ExactTokensRecord
from foreshock.rollouts import ExactBatch, RolloutBatch
from foreshock.rollouts.parquet_files import RolloutFile, find_exact
from foreshock.scorers import EXACT_PAIRS
from foreshock_service.platform.columnar import AnswerTooLarge
from foreshock_service.platform.context import Context
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import TokensPurged, stored_file
from foreshock_service.platform.security import Reader
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.replay.probes.service import rollouts_of_step
from foreshock_service.replay.results.documents import visible_step
from foreshock_service.replay.results.exact import EXACT, ExactNotFound, newest_exact
from foreshock_service.replay.results.files import align_exact, read_exact
from foreshock_service.runs.chosen_tokens import TOKEN_COLUMNS, largest
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.runs.tokens import LARGEST_POSITION, LONGEST_SAMPLE_ID, RolloutNotFound

router = APIRouter(prefix="/v1", tags=["exact divergences"])

_DEFAULT_PAIR = next(iter(EXACT_PAIRS))
_VALUES_OF_TOKEN = len(ExactTokenRecord.__slots__)


@router.get("/runs/{run}/steps/{step}/exact/tokens")
def read_exact_tokens(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    attempt: ActiveOrAttempt = None,
    pair: Annotated[PairKey, Query()] = _DEFAULT_PAIR,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest KL(μ‖π) first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[int, Query(ge=0, le=LARGEST_POSITION, description="last, of a rollout")] = LARGEST_POSITION,
) -> ExactTokensRecord:
    """Return the tokens with the largest divergences, or one rollout token by token."""
    with context.database.read() as session:
        key = visible_step(session, principal, run, step, attempt)
        row = next((each for each in newest_exact(session, key) if each.pair == pair), None)
        if row is None:
            raise ExactNotFound(f"no exact divergences of {pair} are published at step {step}")
        files = [context.store.file(shard.file) for shard in EXACT.shards_of(session, row)]
        rollouts = rollouts_of_step(context, session, key)
        if not files:
            raise TokensPurged(f"the exact divergences of step {key.step} at single tokens were purged by retention")
    with stored_file(f"step {key.step}, or of its exact divergences,"):
        if sample_id is None:
            items = _worst(rollouts, files, worst)
        else:
            positions, most = range(from_position, to_position + 1), context.settings.max_answer_values
            found = _of_rollout(rollouts, files, sample_id, positions, most)
            if found is None:
                raise RolloutNotFound(f"step {key.step} of attempt {key.attempt} has no rollout {sample_id!r}")
            items = found
    return ExactTokensRecord(pair=pair, step=key.step, attempt=key.attempt, sample_id=sample_id, items=tuple(items))


def _worst(rollouts: PinnedRollouts, files: Sequence[StoredFile], most: int) -> list[ExactTokenRecord]:
    """Return the tokens with the largest KL; one row group of rollouts is in memory."""
    worst: list[tuple[float, ExactTokenRecord]] = []
    for _, read in _row_groups(rollouts):
        batch = read()
        exact = _aligned(batch, files)
        if exact is None:
            continue
        sizes = np.where(np.isfinite(exact.kl) & batch.generated, exact.kl, -1.0)
        positions = largest(sizes, most)
        if len(worst) == most:
            positions = positions[sizes[positions] > worst[-1][0]]
        worst += [(float(sizes[position]), _token(batch, exact, position)) for position in positions.tolist()]
        # Stable: of equal values, the earlier token comes first.
        worst = sorted(worst, key=lambda each: -each[0])[:most]
    return [token for _, token in worst]


def _of_rollout(
    rollouts: PinnedRollouts, files: Sequence[StoredFile], sample_id: str, asked: range, most_values: int
) -> list[ExactTokenRecord] | None:
    """Return the tokens of a rollout at the positions `asked`; None if no rollout has this sample id.

    Raises AnswerTooLarge.
    """
    for names, read in _row_groups(rollouts):
        if sample_id in names:
            batch = read().select([names.index(sample_id)])
            positions = asked[: max(batch.num_tokens - asked.start, 0)]
            if len(positions) * _VALUES_OF_TOKEN > most_values:
                raise AnswerTooLarge(
                    f"the answer has {len(positions) * _VALUES_OF_TOKEN:,} values, more than the {most_values:,} of "
                    "FORESHOCK_MAX_ANSWER_VALUES: ask for a part of the rollout (from_position, to_position)"
                )
            # A rollout that was not compared has no divergences: null at each token.
            exact = _aligned(batch, files) or align_exact(batch, [read_exact(files[0])])
            return [_token(batch, exact, position) for position in positions]
    return None


def _row_groups(rollouts: PinnedRollouts) -> Iterator[tuple[list[str], Callable[[], RolloutBatch]]]:
    """Yield the sample ids of each row group, and what reads its rollouts, those that are pinned."""
    samples = rollouts.samples or (None,) * len(rollouts.files)
    for file, sample in zip(rollouts.files, samples, strict=True):
        opened = RolloutFile(file, stored_limits(), only=TOKEN_COLUMNS)
        left = sample
        for group, names in enumerate(opened.sample_ids):
            pinned = names if left is None else names[:left]
            if left is not None:
                left -= len(pinned)
            if pinned:
                yield pinned, partial(_read, opened, group, len(pinned))


def _read(file: RolloutFile, group: int, count: int) -> RolloutBatch:
    batch = file.read(group)
    return batch if count == batch.num_rollouts else batch.select(range(count))


def _aligned(batch: RolloutBatch, files: Sequence[StoredFile]) -> ExactBatch | None:
    """Return the divergences in the order of the batch's tokens; None if no file has one of its rollouts."""
    found = [find_exact(file, batch.sample_ids, stored_limits()) for file in files]
    shards = [each for each in found if each is not None]
    return align_exact(batch, shards) if shards else None


def _token(batch: RolloutBatch, exact: ExactBatch, position: int) -> ExactTokenRecord:
    row = int(np.searchsorted(batch.response_offsets, position, side="right")) - 1
    return ExactTokenRecord(
        sample_id=batch.sample_ids[row],
        position=position - int(batch.response_offsets[row]),
        token_id=int(batch.response_token_ids[position]),
        kl=float(exact.kl[position]),
        reverse_kl=float(exact.reverse_kl[position]),
        tv=float(exact.tv[position]),
        top1_flip=bool(exact.top1_flip[position]),
        target_entropy=float(exact.target_entropy[position]),
        behaviour_entropy=float(exact.behaviour_entropy[position]),
        target_log_prob=float(exact.target_log_probs[position]),
        behaviour_log_prob=float(exact.behaviour_log_probs[position]),
    )
