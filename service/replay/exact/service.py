"""Exact divergences: stored shard by shard while a job runs, measured and published when it is complete.

As for scores, a shard's catalogue row is its commit point, and shards belong to the try that sent them. Measures are
computed before the transaction that publishes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.scorers import EXACT_PAIRS
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables.exact import ExactDivergence, ExactShard
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.platform.store.names import exact_file_name
from foreshock_service.platform.store.reading import stored_file
from foreshock_service.platform.uploads import Upload
from foreshock_service.replay.exact import repository
from foreshock_service.replay.exact.checking import CheckedExact, check_exact
from foreshock_service.replay.exact.files import measure_files
from foreshock_service.replay.exact.schemas import ExactAddress, ExactMeasuresRead, ExactRead, ExactStepRead
from foreshock_service.replay.leases.schemas import UploadReceipt
from foreshock_service.replay.leases.service import check_held, find_lease, is_completed
from foreshock_service.replay.leases.shard_uploads import (
    Check,
    ShardRow,
    ShardUpload,
    check_held_or_completed,
    store_shard,
)
from foreshock_service.replay.probes.service import rollouts_of_probe, rollouts_of_step
from foreshock_service.runs.attempts.service import resolve_step
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.step_key import StepKey


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


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The measures of a pair over the shards with these digests, in order."""

    shards: tuple[str, ...]
    measures: Mapping[str, Any]


def check_address(context: ServiceContext, principal: Principal, address: ExactAddress) -> None:
    """Check the address of an upload before its body is read. Raises LeaseNotFound, LeaseLost, PairNotAsked."""
    job = check_held_or_completed(context, principal, address.lease_id, address.token)
    if address.pair not in job.exact_pairs:
        asked = ", ".join(job.exact_pairs) or "no exact pair"
        raise PairNotAsked(f"this job requests {asked}, got {address.pair}")


def store_exact(context: ServiceContext, principal: Principal, address: ExactAddress, upload: Upload) -> UploadReceipt:
    """Store a received body as a shard, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, ExactConflict, ExactWrongFingerprint or
    LeaseLost.
    """
    shard = ExactUpload(address)
    return store_shard(context, principal, address.lease_id, address.token, upload, shard)


class ExactUpload(ShardUpload[CheckedExact]):
    """A shard of a pair's exact divergences."""

    def __init__(self, address: ExactAddress) -> None:
        self._address = address

    def checker(self) -> Check[CheckedExact]:
        """Return the check of divergences."""
        return check_exact

    def file_name(self, probe: Probe, job: ProbeJob, digest: str) -> str:
        """Return the name of its file in the store."""
        return exact_file_name(probe.run_id, probe.attempt, probe.step, job.id, digest)

    def stored(self, session: Session, job: ProbeJob) -> ShardRow | None:
        """Return the row of its pair and number."""
        return repository.find_shard(session, job.id, self._address.token, self._address.pair, self._address.shard)

    def siblings(self, session: Session, job: ProbeJob) -> Sequence[ExactShard]:
        """Return the stored shards of the same pair."""
        return _by_pair(repository.shards_of_try(session, job.id, self._address.token)).get(self._address.pair, [])

    def conflict(self, stored: ShardRow) -> ProblemError:
        """Return ExactConflict."""
        return ExactConflict(
            f"shard {self._address.shard} of {self._address.pair} has other bytes stored ({stored.digest}): "
            "they are immutable"
        )

    def check_weights(self, expected: str, checked: CheckedExact) -> None:
        """Raise ExactWrongFingerprint for other weights than those of the probe."""
        for name in ("target", "behaviour"):
            used = getattr(checked, f"{name}_fingerprint").weights_digest
            if used not in (None, expected):
                raise ExactWrongFingerprint(
                    f"the {name}'s fingerprint has the weights {used}, expected {expected}, those of the probe"
                )

    def add(self, session: Session, job: ProbeJob, upload: Upload, checked: CheckedExact, file: str) -> None:
        """Add the row; raises ExactWrongFingerprint if the fingerprints differ from those of its siblings."""
        target, behaviour = checked.target_fingerprint, checked.behaviour_fingerprint
        digests = (target.digest(), behaviour.digest())
        for other in self.siblings(session, job):
            if (other.target_fingerprint_digest, other.behaviour_fingerprint_digest) != digests:
                raise ExactWrongFingerprint("its fingerprints differ from those of the pair's other shards")
        row = {
            "job_id": job.id,
            "token": self._address.token,
            "pair": self._address.pair,
            "shard": self._address.shard,
            "digest": upload.digest,
            "body_bytes": upload.size,
            "file": file,
            "rollouts": checked.rollouts,
            "tokens": checked.tokens,
            "target_fingerprint_digest": digests[0],
            "target_fingerprint": target.to_dict(),
            "behaviour_fingerprint_digest": digests[1],
            "behaviour_fingerprint": behaviour.to_dict(),
            "received_at_us": now_us(),
        }
        repository.add_shard(session, row)


def measure_job(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> Mapping[str, MeasuredPair]:
    """Return the measures of each pair of the lease's job, before it is completed; empty if it has no pairs."""
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, lease_id)
        if not job.exact_pairs or is_completed(lease, token):
            return {}
        check_held(lease, job, token)
        pinned = rollouts_of_probe(context, session, probe)
        sent = _by_pair(repository.shards_of_try(session, job.id, token))
        for pair in job.exact_pairs:
            _check_complete(pair, sent.get(pair, []), probe)
        files = {pair: [context.store.file(shard.file) for shard in sent[pair]] for pair in job.exact_pairs}
        digests = {pair: tuple(shard.digest for shard in sent[pair]) for pair in job.exact_pairs}
    found = {}
    for pair, stored in files.items():
        with stored_file(f"a shard of {pair}"):
            measures = ExactMeasuresRead.of(context.decoders.run(measure_files, pinned, stored))
        found[pair] = MeasuredPair(digests[pair], measures.model_dump(mode="json"))
    return found


def publish_exact(
    session: Session, job: ProbeJob, lease: Lease, probe: Probe, measured: Mapping[str, MeasuredPair], now: int
) -> None:
    """Publish the divergences of the job, which is locked. Raises ExactIncomplete if they are not those measured."""
    sent = _by_pair(repository.shards_of_try(session, job.id, lease.token))
    rows = []
    for pair in job.exact_pairs:
        shards = sent.get(pair, [])
        _check_complete(pair, shards, probe)
        known = measured.get(pair)
        if known is None or known.shards != tuple(shard.digest for shard in shards):
            raise ExactIncomplete(f"a shard of {pair} arrived while the job was completed: complete it again")
        rows.append(_row(pair, shards[0], known.measures, lease, job, probe, now))
    if rows:
        repository.publish(session, rows)


def read_exact_step(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None
) -> ExactStepRead:
    """Return the newest divergences of each pair at a step. Raises ExactNotFound, RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, step, attempt)
    items = exact_of_step(session, key)
    if not items:
        pair = next(iter(EXACT_PAIRS))
        raise ExactNotFound(
            f"no exact divergences of step {step} of attempt {key.attempt} are published: request a probe with "
            f'POST /v1/runs/{run_id}/probes {{"step": {step}, "exact_pairs": ["{pair}"]}}'
        )
    return ExactStepRead(run=run_id, step=key.step, attempt=key.attempt, items=items)


def exact_of_step(session: Session, key: StepKey) -> list[ExactRead]:
    """Return the newest divergences of each pair at a step, by pair."""
    return [ExactRead.of_row(row) for row in newest_exact(session, key)]


def newest_exact(session: Session, key: StepKey) -> list[ExactDivergence]:
    """Return one row for each pair of a step: with the newest fingerprints, of the most rollouts."""
    chosen: dict[str, ExactDivergence] = {}
    for row in repository.of_step(session, key):
        best = chosen.setdefault(row.pair, row)
        same = (
            row.target_fingerprint_digest == best.target_fingerprint_digest
            and row.behaviour_fingerprint_digest == best.behaviour_fingerprint_digest
        )
        if same and row.rollouts > best.rollouts:
            chosen[row.pair] = row
    return [chosen[pair] for pair in sorted(chosen)]


def remeasure_exact(context: ServiceContext, key: StepKey) -> str | None:
    """Measure the published divergences of a step again from their files; return why some were left unchanged."""
    left = None
    with context.database.read() as session:
        rows = repository.of_step(session, key)
        rollouts = rollouts_of_step(context, session, key) if rows else None
        files = [[context.store.file(shard.file) for shard in repository.shards_of(session, row)] for row in rows]
    for row, stored in zip(rows, files, strict=True):
        gone = [file.name for file in stored if not file.exists()]
        if gone or rollouts is None:
            left = f"{len(gone)} files of its exact divergences are missing, such as {gone[0]}"
            continue
        measures = ExactMeasuresRead.of(context.decoders.run(measure_files, rollouts, stored)).model_dump(mode="json")
        context.database.write(partial(repository.replace_measures, published=row, measures=measures))
    return left


def _check_complete(pair: str, shards: Sequence[ExactShard], probe: Probe) -> None:
    received = sum(shard.rollouts for shard in shards)
    if received != probe.rollouts:
        raise ExactIncomplete(
            f"{pair} has divergences for {received} rollouts, expected {probe.rollouts}: "
            "send each rollout once, then complete"
        )


def _row(
    pair: str, shard: ExactShard, measures: Mapping[str, Any], lease: Lease, job: ProbeJob, probe: Probe, now: int
) -> dict[str, object]:
    return {
        "run_id": probe.run_id,
        "attempt": probe.attempt,
        "step": probe.step,
        "rollout_set_digest": probe.rollout_set_digest,
        "pair": pair,
        "target_fingerprint_digest": shard.target_fingerprint_digest,
        "behaviour_fingerprint_digest": shard.behaviour_fingerprint_digest,
        "target_fingerprint": shard.target_fingerprint,
        "behaviour_fingerprint": shard.behaviour_fingerprint,
        "job_id": job.id,
        "token": lease.token,
        "accelerator": lease.accelerator,
        "device_name": lease.device_name,
        "rollouts": probe.rollouts,
        "tokens": probe.tokens,
        "from_sample": probe.from_sample,
        "measures": dict(measures),
        "published_at_us": now,
    }


def _by_pair(shards: Sequence[ExactShard]) -> dict[str, list[ExactShard]]:
    found: dict[str, list[ExactShard]] = defaultdict(list)
    for shard in shards:
        found[shard.pair].append(shard)
    return found
