"""Results that workers upload as files, one file for each: check it against the job's rollouts, store, publish.

A file's catalogue row is its commit point. Files belong to the try (fencing token) that sent them: those of a failed
try never count for the next one.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Request, Response, status
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock_service.platform import problem, security, uploads
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import insert_if_absent, table_of, upsert
from foreshock_service.platform.database.tables import probes
from foreshock_service.platform.decoding.worker import decode_limits
from foreshock_service.platform.store import removal, tokens
from foreshock_service.replay.leases.endpoints import UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, hold, is_completed
from foreshock_service.replay.probes import pinned_rollouts, service
from foreshock_service.replay.results import documents, files
from foreshock_service.runs.events import StepKey

Key = tuple[str, ...]
"""The key of a result of a job: (scorer, variant), or (pair,)."""
File = TypeVar("File", bound=probes.ResultFile)
Published = TypeVar("Published", bound=probes.PublishedResult)


class ResultConflict(problem.ProblemError, status=409, problem_type="result-conflict"):
    """Other bytes are already stored under this lease and result."""


class WrongFingerprint(problem.ProblemError, status=422, problem_type="wrong-fingerprint"):
    """A fingerprint has other weights than the job."""


@dataclass(frozen=True, slots=True)
class FileKind(Generic[File, Published]):
    """A kind of result that is sent as files.

    `stored` is the catalogue table of its files, `published` the table of published results. `columns` hold its key in
    both; `sides` are the prefixes of the fingerprints' columns. `asked` returns the keys that a job requests.
    """

    name: files.Format
    stored: type[File]
    published: type[Published]
    columns: tuple[str, ...]
    sides: tuple[str, ...]
    asked: Callable[[probes.ProbeJob], Sequence[Key]]
    title: Callable[[Key], str]

    def file_of(self, session: Session, store: tokens.TokenStore, result: Published) -> tokens.StoredFile | None:
        """Return the file that holds a published result; None if retention has purged it."""
        row = session.get(self.stored, {name: getattr(result, name) for name in ("job_id", "token", *self.columns)})
        return None if row is None else store.file(row.file)

    def files_of_try(self, session: Session, lease: probes.Lease, job: probes.ProbeJob) -> dict[Key, File]:
        """Return the file of each result that a job requests, as this try sent it. Raises ResultIncomplete."""
        rows = session.scalars(select(self.stored).filter_by(job_id=job.id, token=lease.token))
        sent = {tuple(getattr(row, name) for name in self.columns): row for row in rows}
        asked = sorted(self.asked(job))
        missing = next((key for key in asked if key not in sent), None)
        if missing is not None:
            raise documents.ResultIncomplete(f"{self.title(missing)} has no values: send them, then complete")
        return {key: sent[key] for key in asked}

    def of_step(self, session: Session, key: StepKey) -> Sequence[Published]:
        """Return the published results of a step, newest first."""
        table: Any = self.published
        order = [table.published_at_us.desc(), table.rollouts.desc(), *(getattr(table, name) for name in self.digests)]
        query = select(self.published).filter_by(**key._asdict()).order_by(*order)
        return session.scalars(query.execution_options(populate_existing=True)).all()

    def newest_of_step(
        self, session: Session, key: StepKey, place: Callable[[Published], Hashable]
    ) -> dict[Hashable, Published]:
        """Return one result of a step for each place: of those with the newest fingerprint, the one with most rollouts.

        A later sample therefore never hides a result of all rollouts with the same fingerprint.
        """
        chosen: dict[Hashable, Published] = {}
        for row in self.of_step(session, key):
            best = chosen.setdefault(place(row), row)
            same = all(getattr(row, name) == getattr(best, name) for name in self.digests)
            if same and row.rollouts > best.rollouts:
                chosen[place(row)] = row
        return chosen

    @property
    def digests(self) -> tuple[str, ...]:
        """The columns with the digests of its fingerprints."""
        return tuple(f"{side}fingerprint_digest" for side in self.sides)

    def publish(
        self,
        session: Session,
        lease: probes.Lease,
        job: probes.ProbeJob,
        probe: probes.Probe,
        now: int,
        measures: Mapping[Key, Mapping[str, Any]] | None = None,
    ) -> bool:
        """Publish the results of a try and return whether there are any. Raises ResultIncomplete.

        A result with an equal key that is already published then points at the file of this try. `measures` are
        stored with the results, if the kind has measures.
        """
        sent = self.files_of_try(session, lease, job)
        rows = [
            {
                "run_id": probe.run_id,
                "attempt": probe.attempt,
                "step": probe.step,
                "rollout_set_digest": probe.rollout_set_digest,
                **dict(zip(self.columns, key, strict=True)),
                **{
                    f"{side}{name}": getattr(file, f"{side}{name}")
                    for side in self.sides
                    for name in ("fingerprint_digest", "fingerprint")
                },
                "job_id": job.id,
                "token": lease.token,
                "accelerator": lease.accelerator,
                "device_name": lease.device_name,
                "rollouts": probe.rollouts,
                "tokens": probe.tokens,
                "from_sample": probe.from_sample,
                "published_at_us": now,
                **({} if measures is None else {"measures": dict(measures[key])}),
            }
            for key, file in sent.items()
        ]
        upsert(session, self.published, rows, [column.name for column in table_of(self.published).primary_key])
        return bool(rows)


@dataclass(frozen=True, slots=True)
class FileAddress:
    """The address of a file: its result's kind and key, and the lease and token under which it is sent."""

    kind: FileKind[Any, Any]
    lease_id: str
    token: int
    key: Key

    @property
    def named(self) -> dict[str, str]:
        """The columns of its key."""
        return dict(zip(self.kind.columns, self.key, strict=True))


async def receive_file(
    request: Request,
    response: Response,
    context: ServiceContext,
    principal: security.Principal,
    address: FileAddress,
) -> UploadReceipt:
    """Store the body of a request as a file; the status is 200 if the same bytes are already stored."""
    await run_in_threadpool(check_address, context, principal, address)
    most_bytes = context.settings.max_body_bytes
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes) as upload:
        receipt = await context.uploads.run(store_file, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


def check_address(context: ServiceContext, principal: security.Principal, address: FileAddress) -> None:
    """Check the address of an upload before its body is read. Raises LeaseNotFound, LeaseLost, ResultNotAsked."""
    with context.database.read() as session:
        lease, job, _ = find_lease(session, principal, address.lease_id)
        if not is_completed(lease, address.token):
            check_held(lease, job, address.token)
        asked = sorted(address.kind.asked(job))
    if address.key not in asked:
        names = ", ".join(map(address.kind.title, asked)) or f"no {address.kind.name}"
        raise documents.ResultNotAsked(f"this job requests {names}, got {address.kind.title(address.key)}")


@dataclass(frozen=True, slots=True)
class _Prepared:
    pinned: pinned_rollouts.PinnedRollouts
    file: str
    weights: str


def store_file(
    context: ServiceContext, principal: security.Principal, address: FileAddress, upload: uploads.Upload
) -> UploadReceipt:
    """Store a received body as a file, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, the errors of the kind, or LeaseLost.
    """
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, address.lease_id)
        stored = _stored(address, session, job, upload)
        if stored is not None:
            return stored
        check_held(lease, job, address.token)
        prepared = _Prepared(
            service.rollouts_of_probe(context, session, probe),
            tokens.result_file_name(probe.run_id, probe.attempt, probe.step, address.kind.name, job.id, upload.digest),
            str(probe.checkpoint["digest"]),
        )
    checked = _check(context, address, upload, prepared)
    commit = partial(_commit, principal, address, upload, prepared.file, checked)
    return uploads.commit_file(context.database, context.store, prepared.file, commit)


def _check(
    context: ServiceContext, address: FileAddress, upload: uploads.Upload, prepared: _Prepared
) -> files.CheckedFile:
    """Check the upload in a decoder process and move its file into the store."""
    temporary = context.store.temporary_file()
    try:
        with problem.present_file("the probe's rollouts"):
            checked = context.decoders.run(
                files.check_upload, address.kind.name, upload.path, temporary, prepared.pinned,
                decode_limits(context.settings),
            )  # fmt: skip
        for side, fingerprint in zip(address.kind.sides, checked.fingerprints, strict=True):
            if fingerprint.weights_digest not in (None, prepared.weights):
                whose = f"the {side.removesuffix('_')}'s" if side else "its"
                raise WrongFingerprint(
                    f"{whose} fingerprint has the weights {fingerprint.weights_digest}, expected {prepared.weights}, "
                    "those of the probe"
                )
        context.store.publish(temporary, prepared.file)
    finally:
        temporary.unlink(missing_ok=True)
    return checked


def _commit(
    principal: security.Principal,
    address: FileAddress,
    upload: uploads.Upload,
    file: str,
    checked: files.CheckedFile,
    session: Session,
) -> UploadReceipt:
    """Add the catalogue row, unless this or another upload of the result was committed meanwhile."""
    _, job, _ = hold(session, principal, address.lease_id, address.token)
    stored = _stored(address, session, job, upload)
    if stored is not None:
        return stored
    kind = address.kind
    removal.check_not_taken(session, [file])
    digests = {name: each.digest() for name, each in zip(kind.digests, checked.fingerprints, strict=True)}
    fingerprints = zip(kind.sides, checked.fingerprints, strict=True)
    row = {
        "job_id": job.id,
        "token": address.token,
        **address.named,
        "digest": upload.digest,
        "body_bytes": upload.size,
        "file": file,
        "rollouts": checked.rollouts,
        "tokens": checked.tokens,
        **digests,
        **{f"{side}fingerprint": each.to_dict() for side, each in fingerprints},
    }
    insert_if_absent(session, kind.stored, row)
    return UploadReceipt(status="stored", digest=upload.digest, rollouts=checked.rollouts, tokens=checked.tokens)


def _stored(
    address: FileAddress, session: Session, job: probes.ProbeJob, upload: uploads.Upload
) -> UploadReceipt | None:
    """Return the receipt of the file already stored at this address; raises ResultConflict for other bytes."""
    row = session.get(address.kind.stored, {"job_id": job.id, "token": address.token, **address.named})
    if row is None:
        return None
    if row.digest != upload.digest:
        raise ResultConflict(f"{address.key[0]} has other bytes stored ({row.digest}): they are immutable")
    return UploadReceipt(status="duplicate", digest=row.digest, rollouts=row.rollouts, tokens=row.tokens)
