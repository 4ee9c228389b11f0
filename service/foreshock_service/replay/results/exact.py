"""Exact divergences: measure them before the transaction that publishes them, read them by step."""

from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request, Response, status
from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock.api import records, replays
from foreshock.scorers import EXACT_PAIRS, ExactPair
from foreshock_service.platform import parameters, problem, security, uploads
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken, UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, is_completed
from foreshock_service.replay.probes import schemas, service
from foreshock_service.replay.results.file_results import FileAddress, FileKind, Key, receive_file
from foreshock_service.replay.results.files import measure_exact_file
from foreshock_service.runs import attempts, events

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
