"""Results that workers upload as files, one shard at a time: check a shard against the job's rollouts, store, publish.

A shard's catalogue row is its commit point. Shards belong to the try (fencing token) that sent them: shards of a failed
try never mix with those of the next one. Each rollout of a result is in one shard. The check in the decoder process
uses the shards that are stored when it begins; if another shard is committed meanwhile, the check is repeated.
"""

from collections import defaultdict
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

_TRIES = 5

Key = tuple[str, ...]
"""The key of a result of a job: (scorer, variant), or (pair,)."""
Shard = TypeVar("Shard", bound=probes.UploadedShard)
Published = TypeVar("Published", bound=probes.PublishedResult)


class ShardsBusy(problem.ProblemError, status=503, problem_type="shards-busy"):
    """Other shards of the same result were committed whenever this one was checked."""


class ResultConflict(problem.ProblemError, status=409, problem_type="result-conflict"):
    """Other bytes are already stored under this lease, result and shard."""


class WrongFingerprint(problem.ProblemError, status=422, problem_type="wrong-fingerprint"):
    """A fingerprint has other weights than the job, or differs from that of the result's other shards."""


@dataclass(frozen=True, slots=True)
class FileKind(Generic[Shard, Published]):
    """A kind of result that is sent as files.

    `shards` is the catalogue table of its files, `published` the table of published results. `columns` hold its key in
    both; `sides` are the prefixes of the fingerprints' columns. `asked` returns the keys that a job requests.
    """

    name: files.Format
    shards: type[Shard]
    published: type[Published]
    columns: tuple[str, ...]
    sides: tuple[str, ...]
    asked: Callable[[probes.ProbeJob], Sequence[Key]]
    title: Callable[[Key], str]
    file_name: Callable[[str, int, int, str, str], str]

    def shards_of(self, session: Session, result: Published) -> Sequence[Shard]:
        """Return the shards that hold a published result, in order."""
        equal = {name: getattr(result, name) for name in ("job_id", "token", *self.columns)}
        return session.scalars(select(self.shards).filter_by(**equal).order_by(self.shards.shard)).all()

    def shards_of_try(self, session: Session, job_id: str, token: int) -> dict[Key, list[Shard]]:
        """Return the shards that one try of a job has sent, by key, in the order of their numbers."""
        found: dict[Key, list[Shard]] = defaultdict(list)
        query = select(self.shards).filter_by(job_id=job_id, token=token).order_by(self.shards.shard)
        for shard in session.scalars(query):
            found[tuple(getattr(shard, name) for name in self.columns)].append(shard)
        return found

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

    def check_complete(self, key: Key, shards: Sequence[Shard], probe: probes.Probe) -> None:
        """Raise unless the shards have all rollouts of the probe."""
        received = sum(shard.rollouts for shard in shards)
        if received != probe.rollouts:
            raise documents.ResultIncomplete(
                f"{self.title(key)} has values for {received} rollouts, expected {probe.rollouts}: send each rollout "
                "once, then complete"
            )

    def publish(
        self,
        session: Session,
        lease: probes.Lease,
        job: probes.ProbeJob,
        probe: probes.Probe,
        now: int,
        measures: Mapping[Key, Mapping[str, Any]] | None = None,
    ) -> bool:
        """Publish the results of a try and return whether there are any.

        A result with an equal key that is already published then points at the shards of this try. `measures` are
        stored with the results, if the kind has measures.
        """
        sent = self.shards_of_try(session, job.id, lease.token)
        rows = [
            {
                "run_id": probe.run_id,
                "attempt": probe.attempt,
                "step": probe.step,
                "rollout_set_digest": probe.rollout_set_digest,
                **dict(zip(self.columns, key, strict=True)),
                **{
                    f"{side}{name}": getattr(sent[key][0], f"{side}{name}")
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
            for key in sorted(self.asked(job))
        ]
        upsert(session, self.published, rows, [column.name for column in table_of(self.published).primary_key])
        return bool(rows)


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """The address of a shard: its result's kind and key, its number, and the lease and token under which it is sent."""

    kind: FileKind[Any, Any]
    lease_id: str
    token: int
    key: Key
    shard: int

    @property
    def named(self) -> dict[str, str]:
        """The columns of its key."""
        return dict(zip(self.kind.columns, self.key, strict=True))


async def receive_shard(
    request: Request,
    response: Response,
    context: ServiceContext,
    principal: security.Principal,
    address: ShardAddress,
) -> UploadReceipt:
    """Store the body of a request as a shard; the status is 200 if the same bytes are already stored."""
    await run_in_threadpool(check_address, context, principal, address)
    most_bytes = context.settings.max_body_bytes
    async with uploads.received_upload(request, context.uploads, context.store, most_bytes) as upload:
        receipt = await context.uploads.run(store_shard, context, principal, address, upload)
    if receipt.status == "duplicate":
        response.status_code = status.HTTP_200_OK
    return receipt


def check_address(context: ServiceContext, principal: security.Principal, address: ShardAddress) -> None:
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
    siblings: tuple[probes.UploadedShard, ...]
    file: str
    weights: str


def store_shard(
    context: ServiceContext, principal: security.Principal, address: ShardAddress, upload: uploads.Upload
) -> UploadReceipt:
    """Store a received body as a shard, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, the errors of the kind, LeaseLost, or
    ShardsBusy.
    """
    for _ in range(_TRIES):
        with context.database.read() as session:
            lease, job, probe = find_lease(session, principal, address.lease_id)
            stored = _stored(address, session, job, upload)
            if stored is not None:
                return stored
            check_held(lease, job, address.token)
            prepared = _Prepared(
                service.rollouts_of_probe(context, session, probe),
                tuple(_siblings(address, session, job)),
                address.kind.file_name(probe.run_id, probe.attempt, probe.step, job.id, upload.digest),
                str(probe.checkpoint["digest"]),
            )
        checked = _check(context, address, upload, prepared)
        commit = partial(_commit, principal, address, upload, prepared, checked)
        receipt = uploads.commit_file(context.database, context.store, prepared.file, commit)
        if receipt is not None:
            return receipt
    raise ShardsBusy("other shards of this result arrived with this one: send it again", headers={"Retry-After": "1"})


def _check(
    context: ServiceContext, address: ShardAddress, upload: uploads.Upload, prepared: _Prepared
) -> files.CheckedFile:
    """Check the upload in a decoder process and move its file into the store."""
    temporary = context.store.temporary_file()
    try:
        siblings: tuple[tokens.StoredFile, ...] = tuple(context.store.file(each.file) for each in prepared.siblings)
        with problem.present_file("the probe's rollouts, or of another shard of this result,"):
            checked = context.decoders.run(
                files.check_upload, address.kind.name, upload.path, temporary, prepared.pinned, siblings,
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
    address: ShardAddress,
    upload: uploads.Upload,
    prepared: _Prepared,
    checked: files.CheckedFile,
    session: Session,
) -> UploadReceipt | None:
    """Add the catalogue row; None if the siblings have changed since the shard was checked.

    Raises WrongFingerprint if its fingerprints differ from those of its siblings.
    """
    _, job, _ = hold(session, principal, address.lease_id, address.token)
    stored = _stored(address, session, job, upload)
    if stored is not None:
        return stored
    siblings = _siblings(address, session, job)
    kind = address.kind
    if {each.digest for each in siblings} != {each.digest for each in prepared.siblings}:
        return None
    removal.check_not_taken(session, [prepared.file])
    digests = {name: each.digest() for name, each in zip(kind.digests, checked.fingerprints, strict=True)}
    if any(getattr(other, name) != digest for other in siblings for name, digest in digests.items()):
        raise WrongFingerprint("its fingerprint differs from that of the result's other shards")
    fingerprints = zip(kind.sides, checked.fingerprints, strict=True)
    row = {
        "job_id": job.id,
        "token": address.token,
        **address.named,
        "shard": address.shard,
        "digest": upload.digest,
        "body_bytes": upload.size,
        "file": prepared.file,
        "rollouts": checked.rollouts,
        "tokens": checked.tokens,
        **digests,
        **{f"{side}fingerprint": each.to_dict() for side, each in fingerprints},
    }
    insert_if_absent(session, kind.shards, row)
    return UploadReceipt(status="stored", digest=upload.digest, rollouts=checked.rollouts, tokens=checked.tokens)


def _stored(
    address: ShardAddress, session: Session, job: probes.ProbeJob, upload: uploads.Upload
) -> UploadReceipt | None:
    """Return the receipt of the shard already stored at this address; raises ResultConflict for other bytes."""
    row = session.get(
        address.kind.shards, {"job_id": job.id, "token": address.token, "shard": address.shard, **address.named}
    )
    if row is None:
        return None
    if row.digest != upload.digest:
        raise ResultConflict(
            f"shard {address.shard} of {address.key[0]} has other bytes stored ({row.digest}): they are immutable"
        )
    return UploadReceipt(status="duplicate", digest=row.digest, rollouts=row.rollouts, tokens=row.tokens)


def _siblings(address: ShardAddress, session: Session, job: probes.ProbeJob) -> list[probes.UploadedShard]:
    """Return the stored shards of the same result."""
    return address.kind.shards_of_try(session, job.id, address.token).get(address.key, [])
