"""Exact divergences: measured before the transaction that publishes them, and read by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response, status
from sqlalchemy import update
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, parse, to_json
from foreshock.api.replays import ExactMeasuresRecord, ExactRecord, ExactStepRecord, MeanRecord
from foreshock.interval_names import interval_name
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.exact import ExactMeasures
from foreshock.scorers import EXACT_PAIRS, ExactPair
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import table_of
from foreshock_service.platform.database.tables.probes import ExactDivergence, ExactShard
from foreshock_service.platform.parameters import LARGEST_STEP, ActiveOrAttempt, StepPath
from foreshock_service.platform.problem import ProblemError, stored_file
from foreshock_service.platform.security import Principal, Reader, Worker
from foreshock_service.platform.store.tokens import exact_file_name
from foreshock_service.platform.uploads import PARQUET_BODY
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.leases.schemas import UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, is_completed
from foreshock_service.replay.probes.schemas import PairKey
from foreshock_service.replay.probes.service import rollouts_of_probe, rollouts_of_step
from foreshock_service.replay.results.documents import visible_step
from foreshock_service.replay.results.files import measure_exact_files
from foreshock_service.replay.results.shards import FileKind, Key, ShardAddress, ShardProblems, receive_shard
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.run_endpoints import RunIdentifier

router = APIRouter(prefix="/v1", tags=["exact divergences"])


class ExactNotFound(ProblemError):
    """No exact divergences of this step are published: request a probe with `exact_pairs`."""

    status = 404
    problem_type = "exact-not-found"


class PairNotAsked(ProblemError):
    """The job does not request this exact pair."""

    status = 422
    problem_type = "pair-not-asked"


class ExactConflict(ProblemError):
    """Other bytes are already stored under this lease, pair and shard."""

    status = 409
    problem_type = "exact-conflict"


class ExactWrongFingerprint(ProblemError):
    """A fingerprint has other weights than the job, or differs from that of the pair's other shards."""

    status = 422
    problem_type = "exact-wrong-fingerprint"


class ExactIncomplete(ProblemError):
    """The job is not complete: divergences of some rollouts are missing."""

    status = 409
    problem_type = "exact-incomplete"


EXACT = FileKind(
    name="exact",
    shards=ExactShard,
    published=ExactDivergence,
    columns=("pair",),
    sides=("target_", "behaviour_"),
    asked=lambda job: [(pair,) for pair in job.exact_pairs],
    title=lambda key: key[0],
    file_name=exact_file_name,
    problems=ShardProblems(
        not_asked=PairNotAsked,
        conflict=ExactConflict,
        wrong_fingerprint=ExactWrongFingerprint,
        incomplete=ExactIncomplete,
        values="divergences",
        nothing="no exact pair",
        immutable="they are immutable",
        differing="its fingerprints differ from those of the pair's other shards",
    ),
)


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The measures of a pair over the shards with these digests, in order."""

    shards: tuple[str, ...]
    measures: Mapping[str, Any]


@router.put(
    "/leases/{lease}/exact/{shard}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=PARQUET_BODY,
)
async def put_exact(
    lease: LeaseIdentifier,
    shard: Annotated[int, Path(ge=0, le=LARGEST_STEP)],
    token: LeaseToken,
    pair: Annotated[PairKey, Query()],
    request: Request,
    context: Context,
    principal: Worker,
    response: Response,
) -> UploadReceipt:
    """Store one shard of a pair's divergences: 201 if it is new, 200 for the same bytes, 409 for other bytes."""
    return await receive_shard(request, response, context, principal, ShardAddress(EXACT, lease, token, (pair,), shard))


@router.get("/runs/{run}/steps/{step}/exact")
def read_exact(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> ExactStepRecord:
    """Return the exact divergences of the step's pairs; 404 `exact-not-found` if none are published."""
    with context.database.read() as session:
        key = visible_step(session, principal, run, step, attempt)
        items = tuple(exact_of_step(session, key))
    if not items:
        pair = next(iter(EXACT_PAIRS))
        raise ExactNotFound(
            f"no exact divergences of step {step} of attempt {key.attempt} are published: request a probe with "
            f'POST /v1/runs/{run}/probes {{"step": {step}, "exact_pairs": ["{pair}"]}}'
        )
    return ExactStepRecord(run=run, step=key.step, attempt=key.attempt, items=items)


def exact_of_step(session: Session, key: StepKey) -> list[ExactRecord]:
    """Return the newest divergences of each pair at a step, by pair."""
    return [_record(row) for row in newest_exact(session, key)]


def measures_record(measures: ExactMeasures) -> ExactMeasuresRecord:
    """Return the measures as they are stored."""
    means = {
        name: from_attributes(MeanRecord, value)
        for name in ExactMeasures.__slots__
        if isinstance(value := getattr(measures, name), Interval)
    }
    return from_attributes(ExactMeasuresRecord, measures, **means, interval=interval_name(measures.reliable))


def _record(row: ExactDivergence) -> ExactRecord:
    pair = EXACT_PAIRS.get(row.pair) or ExactPair(*row.pair.split("/", 1))
    measures = parse(ExactMeasuresRecord, row.measures)
    own = {name: getattr(measures, name) for name in ExactMeasuresRecord.__slots__}
    names = {"name": pair.name, "target": pair.target, "behaviour": pair.behaviour}
    return from_attributes(ExactRecord, row, **own, **names)


def newest_exact(session: Session, key: StepKey) -> list[ExactDivergence]:
    """Return one row for each pair of a step, by pair."""
    return sorted(EXACT.newest_of_step(session, key, lambda row: row.pair).values(), key=lambda row: row.pair)


def measure_job(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> Mapping[str, MeasuredPair]:
    """Return the measures of each pair of the lease's job, before it is completed; empty if it has no pairs."""
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, lease_id)
        if not job.exact_pairs or is_completed(lease, token):
            return {}
        check_held(lease, job, token)
        pinned = rollouts_of_probe(context, session, probe)
        sent = EXACT.shards_of_try(session, job.id, token)
        for key in EXACT.asked(job):
            EXACT.check_complete(key, sent.get(key, []), probe)
        files = {pair: [context.store.file(shard.file) for shard in sent[pair,]] for pair in job.exact_pairs}
        digests = {pair: tuple(shard.digest for shard in sent[pair,]) for pair in job.exact_pairs}
    found = {}
    for pair, stored in files.items():
        with stored_file(f"a shard of {pair}"):
            measures = context.decoders.run(measure_exact_files, pinned, stored)
        found[pair] = MeasuredPair(digests[pair], to_json(measures_record(measures)))
    return found


def measures_of(sent: Mapping[Key, list[ExactShard]], measured: Mapping[str, MeasuredPair]) -> dict[Key, Any]:
    """Return the measures of the shards of each pair. Raises ExactIncomplete if they are not the ones measured."""
    found = {}
    for key, shards in sent.items():
        known = measured.get(key[0])
        if known is None or known.shards != tuple(shard.digest for shard in shards):
            raise ExactIncomplete(f"a shard of {key[0]} arrived while the job was completed: complete it again")
        found[key] = known.measures
    return found


def remeasure_exact(context: ServiceContext, key: StepKey) -> str | None:
    """Measure the published divergences of a step again from their files; return why some were left unchanged."""
    left = None
    with context.database.read() as session:
        rows = EXACT.of_step(session, key)
        rollouts = rollouts_of_step(context, session, key) if rows else None
        files = [[context.store.file(shard.file) for shard in EXACT.shards_of(session, row)] for row in rows]
    for row, stored in zip(rows, files, strict=True):
        gone = [file.name for file in stored if not file.exists()]
        if gone or rollouts is None:
            left = f"{len(gone)} files of its exact divergences are missing, such as {gone[0]}"
            continue
        measures = measures_record(context.decoders.run(measure_exact_files, rollouts, stored))
        context.database.write(partial(_replace_measures, row, to_json(measures)))
    return left


def _replace_measures(row: ExactDivergence, measures: dict[str, Any], session: Session) -> None:
    """Replace the measures of published divergences, unless another try has replaced them."""
    names = [*(column.name for column in table_of(ExactDivergence).primary_key), "job_id", "token"]
    same = [getattr(ExactDivergence, name) == getattr(row, name) for name in names]
    session.execute(update(ExactDivergence).where(*same).values(measures=measures))
