"""Scores: stored shard by shard while a job runs, published together when it is complete, as its exact divergences.

A shard's catalogue row is its commit point. Shards belong to the try that sent them: shards of a failed try never mix
with those of the next one, and the score that counts is that of the try which completed the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.configuration_grid import MATRIX_KIND
from foreshock.scorers import score_name
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob, ScoreShard
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.platform.store.names import score_file_name
from foreshock_service.platform.uploads import Upload
from foreshock_service.replay.events import ScoresPublished
from foreshock_service.replay.exact.service import MeasuredPair, measure_job, publish_exact
from foreshock_service.replay.layers.service import publish_layers
from foreshock_service.replay.leases.schemas import UploadReceipt
from foreshock_service.replay.leases.service import find_lease, hold, is_completed
from foreshock_service.replay.leases.shard_uploads import (
    Check,
    ShardRow,
    ShardUpload,
    check_held_or_completed,
    store_shard,
)
from foreshock_service.replay.probes import job_transitions
from foreshock_service.replay.probes.job_bundles import scored_by
from foreshock_service.replay.routing.service import publish_routing
from foreshock_service.replay.scores import repository
from foreshock_service.replay.scores.checking import CheckedScores, check_scores
from foreshock_service.replay.scores.schemas import ScoreAddress
from foreshock_service.replay.weights.service import publish_search

ScorerKey = tuple[str, str]


class ScorerNotAsked(ProblemError):
    """The job does not request scores of this scorer and variant."""

    status = 422
    problem_type = "scorer-not-asked"


class ScoresConflict(ProblemError):
    """Other bytes are already stored under this lease, scorer, variant and shard."""

    status = 409
    problem_type = "scores-conflict"


class WrongFingerprint(ProblemError):
    """The fingerprint has other weights than the job, or differs from that of the score's other shards."""

    status = 422
    problem_type = "wrong-fingerprint"


class ScoresIncomplete(ProblemError):
    """The job is not complete: scores of some rollouts are missing."""

    status = 409
    problem_type = "scores-incomplete"


def check_address(context: ServiceContext, principal: Principal, address: ScoreAddress) -> None:
    """Check the address of an upload before its body is read. Raises LeaseNotFound, LeaseLost, ScorerNotAsked."""
    job = check_held_or_completed(context, principal, address.lease_id, address.token)
    if _key_of(address) not in _asked(job):
        asked = ", ".join(score_name(*each) for each in sorted(_asked(job))) or "no scores"
        raise ScorerNotAsked(f"this job requests {asked}, got {score_name(address.scorer, address.variant)}")


def store_scores(context: ServiceContext, principal: Principal, address: ScoreAddress, upload: Upload) -> UploadReceipt:
    """Store a received body as a score shard, once.

    Stores nothing and raises InvalidRolloutsError naming row and column, ScoresConflict, WrongFingerprint or LeaseLost.
    """
    shard = ScoreUpload(address)
    return store_shard(context, principal, address.lease_id, address.token, upload, shard)


class ScoreUpload(ShardUpload[CheckedScores]):
    """A shard of a score."""

    def __init__(self, address: ScoreAddress) -> None:
        self._address = address

    def checker(self) -> Check[CheckedScores]:
        """Return the check of scores."""
        return check_scores

    def file_name(self, probe: Probe, job: ProbeJob, digest: str) -> str:
        """Return the name of its file in the store."""
        return score_file_name(probe.run_id, probe.attempt, probe.step, job.id, digest)

    def stored(self, session: Session, job: ProbeJob) -> ShardRow | None:
        """Return the row of its scorer, variant and number."""
        at = self._address
        return repository.find_shard(session, job.id, at.token, at.scorer, at.variant, at.shard)

    def siblings(self, session: Session, job: ProbeJob) -> Sequence[ScoreShard]:
        """Return the stored shards of the same score."""
        sent = _by_scorer(repository.shards_of_try(session, job.id, self._address.token))
        return sent.get(_key_of(self._address), [])

    def conflict(self, stored: ShardRow) -> ProblemError:
        """Return ScoresConflict."""
        return ScoresConflict(
            f"shard {self._address.shard} of {self._address.scorer} has other bytes stored ({stored.digest}): "
            "scores are immutable"
        )

    def check_weights(self, expected: str, checked: CheckedScores) -> None:
        """Raise WrongFingerprint for other weights than those of the probe."""
        used = checked.fingerprint.weights_digest
        if used is not None and used != expected:
            raise WrongFingerprint(f"its fingerprint has the weights {used}, expected {expected}, those of the probe")

    def add(self, session: Session, job: ProbeJob, upload: Upload, checked: CheckedScores, file: str) -> None:
        """Add the row; raises WrongFingerprint if the fingerprint differs from that of the score's other shards."""
        fingerprint_digest = checked.fingerprint.digest()
        if any(each.fingerprint_digest != fingerprint_digest for each in self.siblings(session, job)):
            raise WrongFingerprint("its fingerprint differs from that of the score's other shards: they must be equal")
        row = {
            "job_id": job.id,
            "token": self._address.token,
            "scorer": self._address.scorer,
            "variant": self._address.variant,
            "shard": self._address.shard,
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


def complete_job(context: ServiceContext, principal: Principal, lease_id: str, token: int) -> None:
    """Publish the job's scores and exact divergences and end the job; a repeated request changes nothing.

    Raises LeaseNotFound, LeaseLost unless the token is the newest, ScoresIncomplete, ExactIncomplete,
    WeightsSearchMissing, LayersMissing or RoutingMissing if some are missing.
    """
    measured = measure_job(context, principal, lease_id, token)
    published = context.database.write(
        lambda session: publish_job(session, context, principal, lease_id, token, measured)
    )
    if published is not None:
        context.events.publish_after_commit(context, published)


def publish_job(
    session: Session,
    context: ServiceContext,
    principal: Principal,
    lease_id: str,
    token: int,
    measured: Mapping[str, MeasuredPair],
) -> ScoresPublished | None:
    """Publish the job's scores and exact divergences in this transaction; None if no score was published.

    `measured` are the measures of the exact pairs. A try that has published before publishes nothing.
    """
    lease, job, probe = find_lease(session, principal, lease_id)
    if is_completed(lease, token):
        return None
    lease, job, probe = hold(session, principal, lease_id, token)
    sent = _by_scorer(repository.shards_of_try(session, job.id, token))
    for key in _asked(job):
        _check_complete(key, sent.get(key, []), probe)
    now = database_now_us(session)
    publish_exact(session, job, lease, probe, measured, now)
    publish_search(session, job, probe, token, now)
    publish_layers(session, job, probe, token, now)
    publish_routing(session, job, probe, token, now)
    rows = [_score_row(key, sent[key], lease, job, probe, now) for key in sorted(_asked(job))]
    if probe.kind == MATRIX_KIND:
        rows = []  # configurations that the run does not have are no part of its chain
    published = None
    if rows:
        repository.publish(session, rows)
        published = ScoresPublished(probe.run_id, probe.attempt, probe.step, now)
        context.events.publish(session, published)
    job_transitions.complete(job, lease, now)
    return published


def _check_complete(key: ScorerKey, shards: Sequence[ScoreShard], probe: Probe) -> None:
    received = sum(shard.rollouts for shard in shards)
    if received != probe.rollouts:
        raise ScoresIncomplete(
            f"{score_name(*key)} has scores for {received} rollouts, expected {probe.rollouts}: "
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
    return {(each["scorer"], each["variant"]) for each in scored_by(job)}


def _key_of(address: ScoreAddress) -> ScorerKey:
    return address.scorer, address.variant
