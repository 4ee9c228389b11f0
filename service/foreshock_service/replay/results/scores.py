"""The log-probs that workers gave to a job's rollouts: check an upload, store it as a file, publish it, read it.

A file's catalogue row is its commit point. Files belong to the try (fencing token) that sent them: those of a failed
try never count for the next one.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from fastapi import Query, Request, Response, status
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock import scorers
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform import parameters, problem, uploads
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import table_of, upsert
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, Score, ScoreFile
from foreshock_service.platform.decoding.worker import decode_limits
from foreshock_service.platform.store import removal, tokens
from foreshock_service.replay import files
from foreshock_service.replay.leases import AskedLease, LeaseOfRequest, UploadReceipt
from foreshock_service.replay.probes import environments, jobs, schemas, service
from foreshock_service.replay.results import documents
from foreshock_service.runs import attempts, events

router = parameters.api_router()


class ResultConflict(problem.ProblemError, status=409, problem_type="result-conflict"):
    """Other bytes are already stored under this lease and result."""


class WrongFingerprint(problem.ProblemError, status=422, problem_type="wrong-fingerprint"):
    """A fingerprint has other weights than the job."""


@router.put(
    "/v1/leases/{lease}/scores",
    tags=["leases"],
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": UploadReceipt, "description": "The same bytes were stored before"}},
    openapi_extra=uploads.PARQUET_BODY,
)
async def put_scores(
    asked: LeaseOfRequest,
    scorer: Annotated[schemas.ScorerName, Query()],
    request: Request,
    response: Response,
    variant: Annotated[schemas.VariantName, Query()] = "",
) -> UploadReceipt:
    """Store a scorer's log-probs: 201 if they are new, 200 for the same bytes, 409 for other bytes."""
    context, key = asked.context, (scorer, variant)
    await run_in_threadpool(_check_asked, asked, key)
    most_bytes = context.settings.max_body_bytes
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes) as upload:
        receipt = await context.uploads.run(_store, asked, key, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


def _check_asked(asked: AskedLease, key: tuple[str, str]) -> None:
    """Check before the body is read. Raises LeaseNotFound, LeaseLost, ResultNotAsked."""
    with asked.context.database.read() as session:
        lease, job, _ = asked.find(session)
        if not asked.has_completed(lease):
            asked.check_held(lease, job)
        wanted = _asked(job)
    if key not in wanted:
        names = ", ".join(scorers.score_name(*each) for each in wanted) or "no scores"
        raise documents.ResultNotAsked(f"this job requests {names}, got {scorers.score_name(*key)}")


def _asked(job: ProbeJob) -> list[tuple[str, str]]:
    """Return the scorers and variants whose log-probs a job requests."""
    return sorted((each["scorer"], each["variant"]) for each in jobs.scored_by(job))


def _store(asked: AskedLease, key: tuple[str, str], upload: uploads.Upload) -> UploadReceipt:
    """Store a received body as a file, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, WrongFingerprint, ResultConflict or LeaseLost.
    """
    context = asked.context

    def stored(session: Session, job: ProbeJob) -> ScoreFile | None:
        row = session.get(ScoreFile, (job.id, asked.token, *key))
        if row is not None and row.digest != upload.digest:
            raise ResultConflict(f"{key[0]} has other bytes stored ({row.digest}): they are immutable")
        return row

    with context.database.read() as session:
        lease, job, probe = asked.find(session)
        if (known := stored(session, job)) is not None:
            return _receipt(known, "duplicate")
        asked.check_held(lease, job)
        pinned = service.rollouts_of_probe(context, session, probe)
    file = tokens.score_file_name(probe.run_id, probe.attempt, probe.step, job.id, upload.digest)
    made = _check(context, upload, pinned, str(probe.checkpoint["digest"]), file)

    def commit(session: Session) -> tuple[ScoreFile, bool]:
        """Add the catalogue row, unless this or another upload of the score was committed meanwhile."""
        _, job, _ = asked.hold(session)
        if (known := stored(session, job)) is not None:
            return known, False
        removal.check_not_taken(session, [file])
        row = ScoreFile(
            job_id=job.id,
            token=asked.token,
            scorer=key[0],
            variant=key[1],
            digest=upload.digest,
            body_bytes=upload.size,
            file=file,
            rollouts=probe.rollouts,
            tokens=probe.tokens,
            fingerprint_digest=made.digest(),
            fingerprint=made.to_dict(),
        )
        session.add(row)
        return row, True

    row, is_new = uploads.commit_file(context.database, context.store, file, commit)
    return _receipt(row, "stored" if is_new else "duplicate")


def _receipt(row: ScoreFile, state: Literal["stored", "duplicate"]) -> UploadReceipt:
    return UploadReceipt(status=state, digest=row.digest, rollouts=row.rollouts, tokens=row.tokens)


def _check(
    context: ServiceContext, upload: uploads.Upload, pinned: files.PinnedRollouts, weights: str, file: str
) -> Fingerprint:
    """Check the upload in a decoder process and move it into the store, as `file`."""
    temporary = context.store.temporary_file()
    try:
        with problem.present_file("the probe's rollouts"):
            limits = decode_limits(context.settings)
            made = context.decoders.run(files.check_upload, upload.path, temporary, pinned, limits)
        if made.weights_digest not in (None, weights):
            raise WrongFingerprint(
                f"its fingerprint has the weights {made.weights_digest}, expected {weights}, those of the probe"
            )
        context.store.publish(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return made


def publish_scores(session: Session, lease: Lease, job: ProbeJob, probe: Probe, now_us: int) -> bool:
    """Publish the scores of a try and return whether there are any. Raises ResultIncomplete.

    A score with an equal key that is already published then points at the file of this try.
    """
    sent = session.scalars(select(ScoreFile).filter_by(job_id=job.id, token=lease.token))
    of_keys = {(file.scorer, file.variant): file for file in sent}
    asked = _asked(job)
    missing = next((key for key in asked if key not in of_keys), None)
    if missing is not None:
        name = scorers.score_name(*missing)
        raise documents.ResultIncomplete(f"{name} has no values: send them, then complete")
    of_probe = ("run_id", "attempt", "step", "rollout_set_digest", "rollouts", "tokens", "from_sample")
    shared = {name: getattr(probe, name) for name in of_probe}
    shared |= {"job_id": job.id, "published_at_us": now_us}
    shared |= {name: getattr(lease, name) for name in ("token", "accelerator", "device_name")}
    of_file = ("scorer", "variant", "fingerprint_digest", "fingerprint")
    rows = [{**shared, **{name: getattr(of_keys[key], name) for name in of_file}} for key in asked]
    upsert(session, Score, rows, [column.name for column in table_of(Score).primary_key])
    return bool(rows)


def newest_scores(session: Session, key: events.StepKey) -> list[Score]:
    """Return the scores of a step, newest first: one for each scorer, variant and platform.

    Of those with the newest fingerprint it is the one with most rollouts: a later sample never hides a score of all
    rollouts with the same fingerprint.
    """
    order = (Score.published_at_us.desc(), Score.rollouts.desc(), Score.fingerprint_digest)
    query = select(Score).filter_by(**key._asdict()).order_by(*order).execution_options(populate_existing=True)
    chosen: dict[tuple[object, ...], Score] = {}
    for row in session.scalars(query):
        place = row.scorer, row.variant, files.environment_of(row.fingerprint).platform
        best = chosen.setdefault(place, row)
        if row.fingerprint_digest == best.fingerprint_digest and row.rollouts > best.rollouts:
            chosen[place] = row
    return list(chosen.values())


def stored_score(session: Session, store: tokens.TokenStore, score: Score) -> files.StoredScore | None:
    """Return a score with its file; None if retention has purged the file."""
    row = session.get(ScoreFile, (score.job_id, score.token, score.scorer, score.variant))
    if row is None:
        return None
    return files.StoredScore(score.scorer, score.variant, store.file(row.file), score.fingerprint)


def read_replayed_scores(
    session: Session, store: tokens.TokenStore, step: tuple[str, int, int], batch: RolloutBatch
) -> Mapping[str, NDArray[np.float32]]:
    """Return each replayed score of the step by name, [T] as the batch's response tokens; NaN for unscored rollouts.

    Of scores in several environments it takes the one nearest to the run's own environment, as the attribution does.
    """
    newest = newest_scores(session, key := events.StepKey(*step))
    scores = [found for score in newest if (found := stored_score(session, store, score)) is not None]
    if not scores:
        return {}
    attempt = attempts.find_attempt(session, key.run_id, key.attempt)
    run = environments.run_fingerprints(batch.attributes, attempt.fingerprint if attempt is not None else {})
    return {each.name: files.read_aligned_scores(batch, each.file) for each in files.preferred_scores(scores, run)}
