"""Shards that the worker of a job uploads: checked against the job's rollouts, stored once, committed under its lock.

Each rollout of a result is in one shard. The check in the decoder process sees the shards that are stored when it
begins; if another shard is committed meanwhile, the commit stores nothing and the check is repeated with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from sqlalchemy.orm import Session

from foreshock.rollouts import DecodeLimits
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob
from foreshock_service.platform.decoding.worker import decode_limits
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.platform.store.reading import present_file
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.platform.uploads import Upload
from foreshock_service.replay.leases.schemas import UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, hold, is_completed
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts
from foreshock_service.replay.probes.service import rollouts_of_probe

_TRIES = 5


class ShardsBusy(ProblemError):
    """Other shards of the same result were committed whenever this one was checked."""

    status = 503
    problem_type = "shards-busy"


class ShardRow(Protocol):
    """The catalogue row of a stored shard."""

    shard: int
    digest: str
    file: str
    rollouts: int
    tokens: int


class Checked(Protocol):
    """What the check of an upload returns."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""

    @property
    def tokens(self) -> int:
        """Number of response tokens."""


CheckedType = TypeVar("CheckedType", bound=Checked)
Check = Callable[[Path, Path, PinnedRollouts, tuple[StoredFile, ...], DecodeLimits], CheckedType]


class ShardUpload(ABC, Generic[CheckedType]):
    """One uploaded shard of a result of a job, as the kinds of results differ."""

    @abstractmethod
    def checker(self) -> Check[CheckedType]:
        """Return the function that checks the upload and writes it in the store's layout, in a decoder process."""

    @abstractmethod
    def file_name(self, probe: Probe, job: ProbeJob, digest: str) -> str:
        """Return the name of its file in the store."""

    @abstractmethod
    def stored(self, session: Session, job: ProbeJob) -> ShardRow | None:
        """Return the row that is stored at its address."""

    @abstractmethod
    def siblings(self, session: Session, job: ProbeJob) -> Sequence[ShardRow]:
        """Return the stored shards of the same result."""

    @abstractmethod
    def conflict(self, stored: ShardRow) -> ProblemError:
        """Return the error for other bytes at its address."""

    @abstractmethod
    def check_weights(self, expected: str, checked: CheckedType) -> None:
        """Raise unless its fingerprints have these weights, or none."""

    @abstractmethod
    def add(self, session: Session, job: ProbeJob, upload: Upload, checked: CheckedType, file: str) -> None:
        """Add its row, the commit point; raises if its fingerprints differ from those of its siblings."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    pinned: PinnedRollouts
    siblings: tuple[ShardRow, ...]
    file: str
    weights: str


def check_held_or_completed(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> ProbeJob:
    """Return the lease's job; raise LeaseLost unless the token holds it or has completed it."""
    with context.database.read() as session:
        lease, job, _ = find_lease(session, principal, lease_id)
        if not is_completed(lease, token):
            check_held(lease, job, token)
        return job


def store_shard(
    context: ServiceContext,
    principal: Principal,
    lease_id: str,
    token: int,
    upload: Upload,
    shard: ShardUpload[CheckedType],
) -> UploadReceipt:
    """Store a received body as a shard, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, the errors of `shard`, LeaseLost, or
    ShardsBusy.
    """
    for _ in range(_TRIES):
        with context.database.read() as session:
            prepared = _prepare(context, session, principal, lease_id, token, upload, shard)
        if isinstance(prepared, UploadReceipt):
            return prepared
        with context.store.in_flight(prepared.file):
            checked = _check(context, upload, shard, prepared)
            commit = partial(_commit, principal, lease_id, token, upload, shard, prepared, checked)
            receipt = _write(context, prepared.file, commit)
        if receipt is not None:
            return receipt
    raise ShardsBusy("other shards of this result arrived with this one: send it again", headers={"Retry-After": "1"})


def _prepare(
    context: ServiceContext,
    session: Session,
    principal: Principal,
    lease_id: str,
    token: int,
    upload: Upload,
    shard: ShardUpload[CheckedType],
) -> _Prepared | UploadReceipt:
    lease, job, probe = find_lease(session, principal, lease_id)
    stored = _stored_before(session, job, upload, shard)
    if stored is not None:
        return stored
    check_held(lease, job, token)
    return _Prepared(
        rollouts_of_probe(context, session, probe),
        tuple(shard.siblings(session, job)),
        shard.file_name(probe, job, upload.digest),
        str(probe.checkpoint["digest"]),
    )


def _check(
    context: ServiceContext, upload: Upload, shard: ShardUpload[CheckedType], prepared: _Prepared
) -> CheckedType:
    """Check the upload in a decoder process and publish its file."""
    temporary = context.store.temporary_file()
    try:
        siblings = tuple(context.store.file(each.file) for each in prepared.siblings)
        with present_file("the probe's rollouts, or of another shard of this result,"):
            checked: CheckedType = context.decoders.run(
                shard.checker(), upload.path, temporary, prepared.pinned, siblings, decode_limits(context.settings)
            )
        shard.check_weights(prepared.weights, checked)
        context.store.publish(temporary, prepared.file)
    finally:
        temporary.unlink(missing_ok=True)
    return checked


def _write(
    context: ServiceContext, file: str, commit: Callable[[Session], UploadReceipt | None]
) -> UploadReceipt | None:
    """Run the commit; its file is removed unless it was committed."""
    may_be_committed = False

    def work(session: Session) -> UploadReceipt | None:
        nonlocal may_be_committed
        may_be_committed = False
        receipt = commit(session)
        may_be_committed = receipt is not None and receipt.status == "stored"
        return receipt

    try:
        return context.database.write(work)
    finally:
        # An error of the commit itself does not tell whether it happened: the file stays, at worst as an orphan.
        if not may_be_committed:
            context.store.remove(file)


def _commit(
    principal: Principal,
    lease_id: str,
    token: int,
    upload: Upload,
    shard: ShardUpload[CheckedType],
    prepared: _Prepared,
    checked: CheckedType,
    session: Session,
) -> UploadReceipt | None:
    """Add the row; None if the shard was checked against other siblings than there are now."""
    _, job, _ = hold(session, principal, lease_id, token)
    stored = _stored_before(session, job, upload, shard)
    if stored is not None:
        return stored
    siblings = shard.siblings(session, job)
    if {each.digest for each in siblings} != {each.digest for each in prepared.siblings}:
        return None
    shard.add(session, job, upload, checked, prepared.file)
    return UploadReceipt(status="stored", digest=upload.digest, rollouts=checked.rollouts, tokens=checked.tokens)


def _stored_before(
    session: Session, job: ProbeJob, upload: Upload, shard: ShardUpload[CheckedType]
) -> UploadReceipt | None:
    stored = shard.stored(session, job)
    if stored is None:
        return None
    if stored.digest != upload.digest:
        raise shard.conflict(stored)
    return UploadReceipt(status="duplicate", digest=stored.digest, rollouts=stored.rollouts, tokens=stored.tokens)
