"""Exact divergences: measure them before the transaction that publishes them, read them by step and by token."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import Query, Request, Response, status
from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock.api import records, replays
from foreshock.rollouts import ExactBatch, RolloutBatch, parquet_files
from foreshock.scorers import EXACT_PAIRS, ExactPair
from foreshock_service.platform import columnar, parameters, problem, security, uploads
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken, UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, is_completed
from foreshock_service.replay.probes import pinned_rollouts, schemas, service
from foreshock_service.replay.results.file_results import FileAddress, FileKind, Key, receive_file
from foreshock_service.replay.results.files import align_exact, measure_exact_file, read_exact_file
from foreshock_service.runs import attempts, chosen_tokens, events, tokens

router = parameters.api_router(prefix="/v1", tags=["exact divergences"])


class ExactNotFound(problem.ProblemError, status=404, problem_type="exact-not-found"):
    """No exact divergences of this step are published: request a probe with `exact_pairs`."""


EXACT = FileKind(
    name="exact",
    stored=tables.ExactFile,
    published=tables.ExactDivergence,
    columns=("pair",),
    sides=("target_", "behaviour_"),
    asked=lambda job: [(pair,) for pair in job.exact_pairs],
    title=lambda key: key[0],
)


@router.put(
    "/leases/{lease}/exact",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=uploads.PARQUET_BODY,
)
async def put_exact(
    lease: LeaseIdentifier,
    token: LeaseToken,
    pair: Annotated[schemas.PairKey, Query()],
    request: Request,
    context: Context,
    principal: security.Worker,
    response: Response,
) -> UploadReceipt:
    """Store a pair's divergences: 201 if they are new, 200 for the same bytes, 409 for other bytes."""
    return await receive_file(request, response, context, principal, FileAddress(EXACT, lease, token, (pair,)))


@router.get("/runs/{run}/steps/{step}/exact")
def read_exact(asked: attempts.StepOfRequest) -> replays.ExactStepRecord:
    """Return the exact divergences of the step's pairs; 404 `exact-not-found` if none are published."""
    with asked.context.database.read() as session:
        key = attempts.key_of(session, asked)
        items = tuple(exact_of_step(session, key))
    if not items:
        pair = next(iter(EXACT_PAIRS))
        raise ExactNotFound(
            f"no exact divergences of step {key.step} of attempt {key.attempt} are published: request a probe with "
            f'POST /v1/runs/{key.run_id}/probes {{"step": {key.step}, "exact_pairs": ["{pair}"]}}'
        )
    return replays.ExactStepRecord(run=key.run_id, step=key.step, attempt=key.attempt, items=items)


def exact_of_step(session: Session, key: events.StepKey) -> list[replays.ExactRecord]:
    """Return the newest divergences of each pair at a step, by pair."""
    return [_record(row) for row in newest_exact(session, key)]


def _record(row: tables.ExactDivergence) -> replays.ExactRecord:
    pair = EXACT_PAIRS.get(row.pair) or ExactPair(*row.pair.split("/", 1))
    measures = records.parse(replays.ExactMeasures, row.measures)
    own = {name: getattr(measures, name) for name in replays.ExactMeasures.__slots__}
    names = {"name": pair.name, "target": pair.target, "behaviour": pair.behaviour}
    return records.from_attributes(replays.ExactRecord, row, **own, **names)


def newest_exact(session: Session, key: events.StepKey) -> list[tables.ExactDivergence]:
    """Return one row for each pair of a step, by pair."""
    return sorted(EXACT.newest_of_step(session, key, lambda row: row.pair).values(), key=lambda row: row.pair)


def measure_job(context: ServiceContext, principal: security.Principal, lease_id: str, token: int) -> dict[Key, Any]:
    """Return the measures of each pair of the lease's job before the job is completed; empty if it has no pairs."""
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, lease_id)
        if not job.exact_pairs or is_completed(lease, token):
            return {}
        check_held(lease, job, token)
        pinned = service.rollouts_of_probe(context, session, probe)
        sent = EXACT.files_of_try(session, lease, job)
    found: dict[Key, Any] = {}
    for (pair,), row in sent.items():
        with problem.stored_file(f"the divergences of {pair}"):
            measures = context.decoders.run(measure_exact_file, pinned, context.store.file(row.file))
        found[pair,] = records.to_json(measures)
    return found


def remeasure_exact(context: ServiceContext, key: events.StepKey) -> str | None:
    """Measure the published divergences of a step again from their files; return why some were left unchanged."""
    with context.database.read() as session:
        rows = EXACT.of_step(session, key)
        if not rows:
            return None
        rollouts = service.rollouts_of_step(context, session, key)
        files = [EXACT.file_of(session, context.store, row) for row in rows]
    gone = []
    for row, file in zip(rows, files, strict=True):
        if file is None or not file.exists():
            gone.append(row.pair if file is None else file.name)
            continue
        measures = context.decoders.run(measure_exact_file, rollouts, file)
        context.database.write(partial(_replace_measures, row, records.to_json(measures)))
    return f"{len(gone)} files of its exact divergences are missing, such as {gone[0]}" if gone else None


def _replace_measures(row: tables.ExactDivergence, measures: dict[str, Any], session: Session) -> None:
    """Replace the measures of published divergences, unless another try has replaced them."""
    names = [*(column.name for column in engine.table_of(tables.ExactDivergence).primary_key), "job_id", "token"]
    same = [getattr(tables.ExactDivergence, name) == getattr(row, name) for name in names]
    session.execute(update(tables.ExactDivergence).where(*same).values(measures=measures))


_DEFAULT_PAIR = next(iter(EXACT_PAIRS))
_VALUES_OF_TOKEN = len(replays.ExactTokenRecord.__slots__)


@router.get("/runs/{run}/steps/{step}/exact/tokens")
def read_exact_tokens(
    asked: attempts.StepOfRequest,
    pair: Annotated[schemas.PairKey, Query()] = _DEFAULT_PAIR,
    worst: Annotated[int, Query(ge=1, le=1000, description="number of tokens, largest KL(μ‖π) first")] = 20,
    sample_id: Annotated[
        str | None, Query(max_length=tokens.LONGEST_SAMPLE_ID, description="return all tokens of this rollout instead")
    ] = None,
    from_position: Annotated[int, Query(ge=0, le=tokens.LARGEST_POSITION, description="first, of a rollout")] = 0,
    to_position: Annotated[
        int, Query(ge=0, le=tokens.LARGEST_POSITION, description="last, of a rollout")
    ] = tokens.LARGEST_POSITION,
) -> replays.ExactTokensRecord:
    """Return the tokens with the largest divergences, or one rollout token by token."""
    context = asked.context
    with context.database.read() as session:
        key = attempts.key_of(session, asked)
        row = next((each for each in newest_exact(session, key) if each.pair == pair), None)
        if row is None:
            raise ExactNotFound(f"no exact divergences of {pair} are published at step {key.step}")
        file = EXACT.file_of(session, context.store, row)
        rollouts = service.rollouts_of_step(context, session, key)
        if file is None:
            raise problem.TokensPurged(
                f"the exact divergences of step {key.step} at single tokens were purged by retention"
            )
    with problem.stored_file(f"step {key.step}, or of its exact divergences,"):
        if sample_id is None:
            items = _worst(rollouts, file, worst)
        else:
            positions, most = range(from_position, to_position + 1), context.settings.max_answer_values
            found = _of_rollout(rollouts, file, sample_id, positions, most)
            if found is None:
                raise tokens.RolloutNotFound(f"step {key.step} of attempt {key.attempt} has no rollout {sample_id!r}")
            items = found
    return replays.ExactTokensRecord(
        pair=pair, step=key.step, attempt=key.attempt, sample_id=sample_id, items=tuple(items)
    )


def _worst(rollouts: pinned_rollouts.PinnedRollouts, file: StoredFile, most: int) -> list[replays.ExactTokenRecord]:
    """Return the tokens with the largest KL; holds one row group of rollouts in memory at a time."""
    worst: list[tuple[float, replays.ExactTokenRecord]] = []
    for _, read in _row_groups(rollouts):
        batch = read()
        exact = _aligned(batch, file)
        if exact is None:
            continue
        sizes = np.where(np.isfinite(exact.kl) & batch.generated, exact.kl, -1.0)
        positions = chosen_tokens.largest(sizes, most)
        if len(worst) == most:
            positions = positions[sizes[positions] > worst[-1][0]]
        worst += [(float(sizes[position]), _token(batch, exact, position)) for position in positions.tolist()]
        # A stable sort: of equal values, the earlier token comes first.
        worst = sorted(worst, key=lambda each: -each[0])[:most]
    return [token for _, token in worst]


def _of_rollout(
    rollouts: pinned_rollouts.PinnedRollouts,
    file: StoredFile,
    sample_id: str,
    asked: range,
    most_values: int,
) -> list[replays.ExactTokenRecord] | None:
    """Return the tokens of a rollout at the positions `asked`; None if no rollout has this sample id.

    Raises AnswerTooLarge.
    """
    for names, read in _row_groups(rollouts):
        if sample_id in names:
            batch = read().select([names.index(sample_id)])
            positions = asked[: max(batch.num_tokens - asked.start, 0)]
            if len(positions) * _VALUES_OF_TOKEN > most_values:
                raise columnar.AnswerTooLarge(
                    f"the answer has {len(positions) * _VALUES_OF_TOKEN:,} values, more than the {most_values:,} of "
                    "FORESHOCK_MAX_ANSWER_VALUES: ask for a part of the rollout (from_position, to_position)"
                )
            # A rollout that was not compared has no divergences: null at each token.
            exact = _aligned(batch, file) or align_exact(batch, read_exact_file(file))
            return [_token(batch, exact, position) for position in positions]
    return None


def _row_groups(rollouts: pinned_rollouts.PinnedRollouts) -> Iterator[tuple[list[str], Callable[[], RolloutBatch]]]:
    """Yield the sample ids of the pinned rollouts of each row group, and a function that reads these rollouts."""
    samples = rollouts.samples or (None,) * len(rollouts.files)
    for file, sample in zip(rollouts.files, samples, strict=True):
        opened = parquet_files.RolloutFile(file, stored_limits(), only=chosen_tokens.TOKEN_COLUMNS)
        left = sample
        for group, names in enumerate(opened.sample_ids):
            pinned = names if left is None else names[:left]
            if left is not None:
                left -= len(pinned)
            if pinned:
                yield pinned, partial(_read, opened, group, len(pinned))


def _read(file: parquet_files.RolloutFile, group: int, count: int) -> RolloutBatch:
    batch = file.read(group)
    return batch if count == batch.num_rollouts else batch.select(range(count))


def _aligned(batch: RolloutBatch, file: StoredFile) -> ExactBatch | None:
    """Return the divergences in the order of the batch's tokens; None if the file has none of its rollouts."""
    found = parquet_files.find_exact(file, batch.sample_ids, stored_limits())
    return align_exact(batch, found) if found is not None else None


def _token(batch: RolloutBatch, exact: ExactBatch, position: int) -> replays.ExactTokenRecord:
    row = int(np.searchsorted(batch.response_offsets, position, side="right")) - 1
    return replays.ExactTokenRecord(
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
