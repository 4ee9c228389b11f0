"""Scores: stored shard by shard while a job runs, published together when it is complete.

A shard's catalogue row is its commit point. Shards belong to the try that sent them, so what a lost try left behind
never mixes with what the next one sends: the score that counts is that of the try which completed the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.context import ServiceContext
from service.platform.database.dialect import database_now_us
from service.platform.database.tables.probes import Lease, Probe, ProbeJob, ScoreShard
from service.platform.decoding.limits import decode_limits
from service.platform.events import EventBus
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.platform.store.tokens import score_file_name
from service.platform.uploads import Upload
from service.replay.events import ScoresPublished
from service.replay.leases import transitions
from service.replay.leases.service import check_held, find_lease, hold
from service.replay.leases.transitions import Outcome
from service.replay.probes.repository import shards_of_probe
from service.replay.probes.service import pinned_rollouts
from service.replay.scores import repository
from service.replay.scores.replayed import CheckedScores, check_scores, write_rollouts
from service.replay.scores.schemas import ScoreAddress, ScoreReceipt

ScorerKey = tuple[str, str]


class ScorerNotAsked(ProblemError):
    """The job does not ask for scores of this scorer and variant."""

    status = 422


class ScoresConflict(ProblemError):
    """Other bytes are already stored under this lease, scorer, variant and shard."""

    status = 409


class WrongFingerprint(ProblemError):
    """The fingerprint says other weights than the job's, or another one than the score's other shards."""

    status = 422


class ScoresIncomplete(ProblemError):
    """The job cannot be complete: scores of some rollouts are missing, or there twice."""

    status = 409


def check_address(context: ServiceContext, principal: Principal, address: ScoreAddress) -> None:
    """Refuse, before its body is read, an upload that cannot be taken; raises LeaseLost and ScorerNotAsked."""
    with context.database.read() as session:
        lease, job, _ = find_lease(session, principal, address.lease_id)
        _check_scorer(job, address)
        if not _is_completed(lease, address.token):
            check_held(lease, job, address.token)


def store_scores(context: ServiceContext, principal: Principal, address: ScoreAddress, upload: Upload) -> ScoreReceipt:
    """Store a received body as a score shard, once.

    Raises InvalidRolloutsError naming row and column, ScoresConflict, WrongFingerprint, LeaseLost; then nothing is
    stored.
    """
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, address.lease_id)
        stored = _stored_before(session, job, address, upload.digest)
        if stored is not None:
            return stored
        check_held(lease, job, address.token)
        pinned = pinned_rollouts(context, shards_of_probe(session, probe), probe.max_rollouts)
        sent = _by_scorer(repository.shards_of_try(session, job.id, address.token)).get(_key_of(address), [])
        siblings = tuple(context.store.path_of(shard.file) for shard in sent)
        name = score_file_name(probe.run_id, probe.attempt, probe.step, job.id, upload.digest)
        weights = str(probe.checkpoint["digest"])
    temporary = context.store.temporary_file()
    try:
        checked = context.decoders.run(
            check_scores, upload.path, temporary, pinned, siblings, decode_limits(context.settings)
        )
        _check_weights(weights, checked)
        context.store.publish(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    return context.database.write(lambda session: _commit_shard(session, principal, address, upload, checked, name))


def write_job_rollouts(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> Path:
    """A temporary file with the job's rollouts; whoever asked removes it. Raises LeaseLost."""
    with context.database.read() as session:
        lease, job, probe = find_lease(session, principal, lease_id)
        check_held(lease, job, token)
        pinned = pinned_rollouts(context, shards_of_probe(session, probe), probe.max_rollouts)
    target = context.store.temporary_file()
    try:
        context.decoders.run(write_rollouts, pinned, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def publish_job(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> Probe:
    """The job is done: its scores count from now on. Done twice, it is done once.

    Raises LeaseLost unless the token is the newest, ScoresIncomplete where scores are missing.
    """
    return context.database.write(lambda session: _publish_job(session, context.events, principal, lease_id, token))


def _publish_job(session: Session, events: EventBus, principal: Principal, lease_id: str, token: int) -> Probe:
    lease, job, probe = find_lease(session, principal, lease_id)
    if _is_completed(lease, token):
        return probe
    lease, job, probe = hold(session, principal, lease_id, token)
    sent = _by_scorer(repository.shards_of_try(session, job.id, token))
    for key in _asked(job):
        _check_complete(key, sent.get(key, []), probe)
    now = database_now_us(session)
    repository.publish(session, [_score_row(key, sent[key], lease, job, probe, now) for key in sorted(_asked(job))])
    events.publish(session, ScoresPublished(probe.run_id, probe.attempt, probe.step, now))
    transitions.complete(job, lease, now)
    return probe


def _commit_shard(
    session: Session,
    principal: Principal,
    address: ScoreAddress,
    upload: Upload,
    checked: CheckedScores,
    file: str,
) -> ScoreReceipt:
    _, job, _ = hold(session, principal, address.lease_id, address.token)
    stored = _stored_before(session, job, address, upload.digest)
    if stored is not None:
        return stored
    fingerprint_digest = checked.fingerprint.digest()
    siblings = _by_scorer(repository.shards_of_try(session, job.id, address.token))
    if any(each.fingerprint_digest != fingerprint_digest for each in siblings.get(_key_of(address), [])):
        raise WrongFingerprint("its fingerprint is not that of the score's other shards: they must be made alike")
    row = {
        "job_id": job.id,
        "token": address.token,
        "scorer": address.scorer,
        "variant": address.variant,
        "shard": address.shard,
        "digest": upload.digest,
        "body_bytes": upload.size,
        "file": file,
        "rollouts": checked.rollouts,
        "tokens": checked.tokens,
        "fingerprint_digest": fingerprint_digest,
        "fingerprint": checked.fingerprint.to_dict(),
        "received_at_us": now_us(),
    }
    repository.add_shard(session, row)
    return ScoreReceipt(status="stored", digest=upload.digest, rollouts=checked.rollouts, tokens=checked.tokens)


def _stored_before(session: Session, job: ProbeJob, address: ScoreAddress, digest: str) -> ScoreReceipt | None:
    shard = repository.find_shard(session, job.id, address.token, address.scorer, address.variant, address.shard)
    if shard is None:
        return None
    if shard.digest != digest:
        raise ScoresConflict(
            f"shard {address.shard} of {address.scorer} holds other bytes ({shard.digest}): scores are immutable"
        )
    return ScoreReceipt(status="duplicate", digest=shard.digest, rollouts=shard.rollouts, tokens=shard.tokens)


def _check_scorer(job: ProbeJob, address: ScoreAddress) -> None:
    if _key_of(address) not in _asked(job):
        asked = ", ".join(f"{scorer} {variant}".strip() for scorer, variant in sorted(_asked(job)))
        raise ScorerNotAsked(f"this job asks for {asked}, not for {address.scorer} {address.variant}".rstrip())


def _check_weights(meant: str, checked: CheckedScores) -> None:
    used = checked.fingerprint.weights_digest
    if used is not None and used != meant:
        raise WrongFingerprint(f"it was made with the weights {used}, and the probe is of the weights {meant}")


def _check_complete(key: ScorerKey, shards: Sequence[ScoreShard], probe: Probe) -> None:
    there = sum(shard.rollouts for shard in shards)
    if there != probe.rollouts:
        name = " ".join(key).strip()
        raise ScoresIncomplete(
            f"{name} has scores for {there} rollouts and the job has {probe.rollouts}: "
            "send each rollout once, then complete"
        )


def _score_row(
    key: ScorerKey, shards: Sequence[ScoreShard], lease: Lease, job: ProbeJob, probe: Probe, now: int
) -> dict[str, object]:
    return {
        "run_id": probe.run_id,
        "attempt": probe.attempt,
        "step": probe.step,
        "rollout_set_digest": probe.rollout_set_digest,
        "scorer": key[0],
        "variant": key[1],
        "fingerprint_digest": shards[0].fingerprint_digest,
        "fingerprint": shards[0].fingerprint,
        "job_id": job.id,
        "token": lease.token,
        "accelerator": lease.accelerator,
        "device_name": lease.device_name,
        "rollouts": probe.rollouts,
        "tokens": probe.tokens,
        "from_sample": probe.from_sample,
        "published_at_us": now,
    }


def _by_scorer(shards: Sequence[ScoreShard]) -> dict[ScorerKey, list[ScoreShard]]:
    found: dict[ScorerKey, list[ScoreShard]] = defaultdict(list)
    for shard in shards:
        found[shard.scorer, shard.variant].append(shard)
    return found


def _asked(job: ProbeJob) -> set[ScorerKey]:
    return {(each["scorer"], each["variant"]) for each in job.scorers}


def _key_of(address: ScoreAddress) -> ScorerKey:
    return address.scorer, address.variant


def _is_completed(lease: Lease, token: int) -> bool:
    """Whether this very try has completed its job: the answer to it may have been lost."""
    return lease.outcome == Outcome.COMPLETED and lease.token == token
