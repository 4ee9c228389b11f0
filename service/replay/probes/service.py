"""Probes: make one (or find the equal one), show them, try one again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.digests import digest_of_json
from foreshock.scorers import SCORERS, VARIANTS, available_scorers
from service.platform.context import ServiceContext
from service.platform.database.dialect import database_now_us, insert_if_absent
from service.platform.database.tables import Shard
from service.platform.database.tables.probes import Probe, ProbeJob
from service.platform.identifiers import new_identifier
from service.platform.pagination import CursorKey, Page, decode_cursor, page_of
from service.platform.problem import ProblemError
from service.platform.security import Principal
from service.replay.leases.transitions import ENDED, JobState, requeue
from service.replay.probes import repository
from service.replay.probes.schemas import ProbeCreate, ProbeRead, ScorerRequest
from service.replay.scores.replayed import PinnedRollouts, RolloutCount, count_rollouts
from service.runs.attempts.service import resolve_step
from service.runs.rollouts.service import shards_of_step
from service.runs.runs.service import get_run
from service.runs.steps.service import find_step

_WEIGHTS_FIELDS = ("root", "path", "format", "digest", "step", "weights_version")


class ProbeNotFound(ProblemError):
    """No probe with this id is visible to this key."""

    status = 404


class UnknownScorer(ProblemError):
    """A scorer or variant that no worker of this release implements."""

    status = 422


class ProbeNotPossible(ProblemError):
    """The step has no rollouts, is not closed, or has no checkpoint to score it with."""

    status = 422


class ProbeStillRuns(ProblemError):
    """Only a probe that has ended can be tried again."""

    status = 409


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request with all that it means by now: the attempt, the rollouts, the weights."""

    run_id: str
    attempt: int
    body: ProbeCreate
    selection: list[list[Any]]
    rollouts: PinnedRollouts
    weights: dict[str, Any]
    weights_expire_at_us: int | None

    @property
    def scorers(self) -> list[ScorerRequest]:
        return sorted(self.body.scorers, key=lambda each: (each.scorer, each.variant))

    def request_digest(self) -> str:
        """What makes two requests the same one."""
        asked = self.body.model_dump(mode="json", exclude={"attempt", "scorers", "checkpoint_step"})
        scorers = [each.model_dump() for each in self.scorers]
        meant = {"attempt": self.attempt, "scorers": scorers, "selection": self.selection, "weights": self.weights}
        return digest_of_json({**asked, **meant})


def create_probe(
    context: ServiceContext, principal: Principal, run_id: str, body: ProbeCreate
) -> tuple[ProbeRead, bool]:
    """The probe of this request, and whether it is new; raises UnknownScorer and ProbeNotPossible."""
    _check_scorers(body)
    with context.database.read() as session:
        plan = _plan(context, session, principal, run_id, body)
        known = repository.find_by_request(session, run_id, plan.request_digest())
        if known is not None:
            return _read(session, known), False
    count = context.decoders.run(count_rollouts, plan.rollouts)
    return context.database.write(lambda session: _insert(session, plan, count))


def pinned_rollouts(context: ServiceContext, shards: Sequence[Shard], max_rollouts: int | None) -> PinnedRollouts:
    """The files of a probe's rollouts, for a decoder."""
    files = tuple(context.store.path_of(shard.file) for shard in shards)
    return PinnedRollouts(files, max_rollouts)


def read_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRead:
    """The probe with its jobs; raises ProbeNotFound."""
    return _read(session, get_probe(session, principal, probe_id))


def get_probe(session: Session, principal: Principal, probe_id: str) -> Probe:
    """The probe, if the principal may see its run; raises ProbeNotFound, RunDeleted."""
    probe = repository.find(session, probe_id)
    if probe is None or not principal.sees(repository.run_of(session, probe).project):
        raise ProbeNotFound(f"there is no probe {probe_id}")
    get_run(session, principal, probe.run_id)
    return probe


def list_probes(
    session: Session, principal: Principal, run_id: str, step: int | None, cursor: str | None, limit: int
) -> Page[ProbeRead]:
    """One page of a run's probes, newest first."""
    get_run(session, principal, run_id)
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None
    probes = repository.newest_of_run(session, run_id, step, after, limit + 1)
    jobs = repository.jobs_of(session, [probe.id for probe in probes])
    return page_of([ProbeRead.of(probe, jobs[probe.id]) for probe in probes], limit, _key_of)


def retry_probe(session: Session, principal: Principal, probe_id: str) -> ProbeRead:
    """Queue the failed and skipped jobs of an ended probe again, with all their tries; raises ProbeStillRuns."""
    probe = get_probe(session, principal, probe_id)
    jobs = repository.lock_jobs(session, probe_id)
    if not all(JobState(job.state) in ENDED for job in jobs):
        raise ProbeStillRuns("the probe has not ended: wait until it is done, failed or skipped")
    now = database_now_us(session)
    for job in jobs:
        if job.state != JobState.DONE:
            requeue(job, now)
    session.flush()
    return _read(session, probe)


def _check_scorers(body: ProbeCreate) -> None:
    for asked in body.scorers:
        if asked.scorer not in available_scorers():
            known = f"scorer {asked.scorer!r} is not implemented in this release"
            wrong = known if asked.scorer in SCORERS else f"unknown scorer {asked.scorer!r}"
            raise UnknownScorer(f"{wrong}; available scorers: {', '.join(available_scorers())}")
        if asked.variant not in VARIANTS:
            raise UnknownScorer(f"unknown variant {asked.variant!r}; variants: {', '.join(map(repr, VARIANTS))}")
    if len(set(body.scorers)) != len(body.scorers):
        raise ProbeNotPossible("a scorer is named twice: name each scorer and variant once")
    unused = set(body.options) - {asked.scorer for asked in body.scorers}
    if unused:
        raise ProbeNotPossible(f"there are options for {', '.join(sorted(unused))}, which is not among the scorers")


def _plan(context: ServiceContext, session: Session, principal: Principal, run_id: str, body: ProbeCreate) -> _Plan:
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, body.step, body.attempt)
    attempt = key.attempt
    step = find_step(session, key)
    if step is None:
        raise ProbeNotPossible(f"step {body.step} of attempt {attempt} has no rollouts to score")
    if step.closed_at_us is None:
        raise ProbeNotPossible(
            f"step {body.step} is not closed yet ({step.received_shards} of {step.expected_shards} shards are here)"
        )
    if body.checkpoint_step not in (None, body.step):
        raise ProbeNotPossible(
            f"an exact probe of step {body.step} takes the weights that sampled it, not those of step "
            f"{body.checkpoint_step}: leave checkpoint_step out"
        )
    checkpoint = repository.find_checkpoint(session, run_id, attempt, body.step)
    if checkpoint is None:
        raise ProbeNotPossible(
            f"no checkpoint is announced for step {body.step} of attempt {attempt}: "
            f"PUT /v1/runs/{run_id}/checkpoints/{body.step}?attempt={attempt} says where its weights are"
        )
    if checkpoint.expires_at_us is not None and checkpoint.expires_at_us <= now_us():
        raise ProbeNotPossible(f"the checkpoint of step {body.step} has expired: its weights are gone")
    shards = shards_of_step(session, key)
    return _Plan(
        run_id=run_id,
        attempt=attempt,
        body=body,
        selection=[[shard.shard, shard.digest] for shard in shards],
        rollouts=pinned_rollouts(context, shards, body.max_rollouts),
        weights={name: getattr(checkpoint, name) for name in _WEIGHTS_FIELDS},
        weights_expire_at_us=checkpoint.expires_at_us,
    )


def _insert(session: Session, plan: _Plan, count: RolloutCount) -> tuple[ProbeRead, bool]:
    now = database_now_us(session)
    body, request_digest = plan.body, plan.request_digest()
    row = {
        "id": new_identifier("probe"),
        "run_id": plan.run_id,
        "attempt": plan.attempt,
        "step": body.step,
        "kind": body.kind,
        "request_digest": request_digest,
        "scorers": [each.model_dump() for each in plan.scorers],
        "options": dict(body.options),
        "accelerator": body.accelerator,
        "max_rollouts": body.max_rollouts,
        "checkpoint": plan.weights,
        "checkpoint_expires_at_us": plan.weights_expire_at_us,
        "selection": plan.selection,
        "rollouts": count.rollouts,
        "tokens": count.tokens,
        "rollout_set_digest": count.rollout_set_digest,
        "from_sample": count.rollouts < count.of_rollouts,
        "created_at_us": now,
    }
    created = insert_if_absent(session, Probe, row)
    probe = repository.find_by_request(session, plan.run_id, request_digest)
    assert probe is not None
    if created:
        session.add_all(new_jobs(probe, plan.scorers, now))
        session.flush()
    return _read(session, probe), created


def new_jobs(probe: Probe, scorers: Sequence[ScorerRequest], now: int) -> list[ProbeJob]:
    """One job for each engine: an engine is started once for all that it scores."""
    by_engine: dict[str, list[ScorerRequest]] = defaultdict(list)
    for each in scorers:
        by_engine[str(SCORERS[each.scorer].engine)].append(each)
    return [
        ProbeJob(
            id=new_identifier("job"),
            probe_id=probe.id,
            engine=engine,
            scorers=[each.model_dump() for each in asked],
            needs=",".join(sorted({each.scorer for each in asked})),
            accelerator=probe.accelerator,
            state=JobState.QUEUED,
            tries=0,
            fencing_token=0,
            lease_id=None,
            lease_expires_at_us=None,
            worker=None,
            reason=None,
            reasons=[],
            queued_at_us=now,
            finished_at_us=None,
        )
        for engine, asked in sorted(by_engine.items())
    ]


def _read(session: Session, probe: Probe) -> ProbeRead:
    return ProbeRead.of(probe, repository.jobs_of(session, [probe.id])[probe.id])


def _key_of(probe: ProbeRead) -> CursorKey:
    return (probe.created_at_us, probe.id)
