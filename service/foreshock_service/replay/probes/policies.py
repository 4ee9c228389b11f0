"""The policy of a run's automatic probes, and the probes that it requests."""

import logging
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import and_, distinct, func, or_, select
from sqlalchemy.orm import Session

from foreshock import errors
from foreshock.api import probes, records
from foreshock.clock import now_us
from foreshock.scorers import default_scorers
from foreshock_service.platform import audit, parameters, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.problem import ProblemError
from foreshock_service.replay.probes import jobs, schemas, service
from foreshock_service.runs import events, runs
from foreshock_service.runs.attempts import active_attempt_of, active_rows, attempts_of_run
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import get_run, lock_run


class ProbePolicyBody(BaseModel):
    """Which steps are probed automatically. Only steps with an announced checkpoint can be."""

    model_config = ConfigDict(extra="forbid")

    every_steps: Annotated[int, Field(ge=1, le=parameters.LARGEST_STEP)] | None = Field(
        default=None, description="probe the first step with a checkpoint in each so many steps; null: none"
    )
    on_alerts: bool = Field(default=False, description="probe the steps near an open alert, before all others")
    rollouts: int = Field(
        default=64, ge=1, le=2**31 - 1, description="score a sample of so many rollouts, stratified by length"
    )
    scorers: list[schemas.ScorerRequest] = Field(
        default_factory=lambda: [schemas.ScorerRequest(scorer=name) for name in default_scorers()],
        min_length=1,
        max_length=32,
    )
    accelerator: schemas.Accelerator | None = Field(default=None, description="only on workers of this accelerator")

    @property
    def is_on(self) -> bool:
        return self.every_steps is not None or self.on_alerts


router = parameters.api_router(prefix="/v1/runs/{run}/probe-policy", tags=["probes"])


def read_policy(session: Session, principal: security.Principal, run_id: str) -> probes.ProbePolicyRecord:
    """Return the run's policy and how many steps it has chosen. Raises RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    stored, policy = session.get(tables.ProbePolicy, run_id), policy_of(session, run_id)
    counts = select(func.count(tables.PolicyProbe.probe_id), func.count()).where(tables.PolicyProbe.run_id == run_id)
    automatic, chosen = session.execute(counts).one()
    return records.from_attributes(
        probes.ProbePolicyRecord,
        policy,
        scorers=tuple(records.from_attributes(probes.ScorerRecord, each) for each in policy.scorers),
        state="active" if policy.is_on else "off",
        automatic_probes=automatic,
        impossible_steps=chosen - automatic,
        changed_at_us=stored.changed_at_us if stored is not None else None,
    )


def policy_in_words(session: Session, principal: security.Principal, run_id: str) -> str | None:
    """Return a note on the run's automatic probes; None if no policy was ever set. Raises RunNotFound, RunDeleted."""
    if session.get(tables.ProbePolicy, run_id) is None:
        return None
    return f"Automatic probes are {'on' if read_policy(session, principal, run_id).state == 'active' else 'off'}."


def policy_of(session: Session, run_id: str) -> ProbePolicyBody:
    """Return the policy of a run as it was set; if none was, one that probes nothing."""
    stored = session.get(tables.ProbePolicy, run_id)
    return ProbePolicyBody() if stored is None else ProbePolicyBody.model_validate(stored.policy)


UNFINISHED_AT_ONCE = 4
"""Most automatic probes of a run that wait or run at once."""

# Most probes made in one round over all runs: each reads the rollouts of its step.
_MADE_AT_ONCE = 8
_SERVICE = security.Principal(None, None, frozenset())
_logger = logging.getLogger(__name__)


def make_automatic_probes(context: ServiceContext) -> int:
    """Make the probes that are due and return how many were made."""
    of_runs = select(tables.ProbePolicy.run_id).join(tables.Run, tables.Run.id == tables.ProbePolicy.run_id)
    of_runs = of_runs.where(tables.Run.deleted_at_us.is_(None)).order_by(tables.ProbePolicy.run_id)
    with context.database.read() as session:
        runs = session.scalars(of_runs).all()
    made = 0
    for run_id in runs:
        if made >= _MADE_AT_ONCE:
            break
        with RunIsolated(context.database, context.events, run_id, "make its automatic probes"):
            with context.database.read() as session:
                policy = policy_of(session, run_id)
                due = _due_steps(session, run_id, policy) if policy.is_on else []
            for key in due[: _MADE_AT_ONCE - made]:
                made += _make(context, key, policy)
    return made


def _due_steps(session: Session, run_id: str, policy: ProbePolicyBody) -> list[events.StepKey]:
    """Return the next steps to probe; steps near an alert come first."""
    states = tables.ProbeJob.state.in_((jobs.JobState.QUEUED, jobs.JobState.RUNNING))
    unfinished = select(func.count(distinct(tables.PolicyProbe.probe_id))).join(
        tables.ProbeJob, tables.ProbeJob.probe_id == tables.PolicyProbe.probe_id
    )
    room = UNFINISHED_AT_ONCE - (session.scalar(unfinished.where(tables.PolicyProbe.run_id == run_id, states)) or 0)
    if room <= 0:
        return []
    checkpoint, step, now_us = tables.Checkpoint, tables.Checkpoint.step, engine.database_now_us(session)
    closed = engine.of_step(tables.Step, checkpoint) & tables.Step.closed_at_us.is_not(None)
    chosen = select(tables.PolicyProbe.step).where(engine.of_step(tables.PolicyProbe, checkpoint))
    # Checkpoints of closed, active steps without an automatic probe.
    possible = and_(
        checkpoint.run_id == run_id,
        active_rows(session, run_id, checkpoint),
        or_(checkpoint.expires_at_us.is_(None), checkpoint.expires_at_us > now_us),
        select(tables.Step.step).where(closed).exists(),
        ~chosen.exists(),
    )
    due: list[events.StepKey] = []
    if policy.on_alerts:
        near = service.is_near_open_alert(run_id, step)
        query = select(tables.Checkpoint.attempt, step).where(possible, near)
        due += [events.StepKey(run_id, *row) for row in session.execute(query.order_by(step).limit(room))]
    if policy.every_steps is not None:
        # The first possible step in each block of so many steps that has no automatic probe.
        block = step // policy.every_steps
        probed = select(tables.PolicyProbe.step).where(
            tables.PolicyProbe.run_id == run_id,
            tables.PolicyProbe.probe_id.is_not(None),
            active_rows(session, run_id, tables.PolicyProbe),
            tables.PolicyProbe.step // policy.every_steps == block,
        )
        # A step is active in one attempt only, so the step alone identifies the checkpoint.
        first, attempts = func.min(step), attempts_of_run(session, run_id)
        steps = session.scalars(
            select(first).where(possible, ~probed.exists()).group_by(block).order_by(first).limit(room)
        )
        found = ((active_attempt_of(attempts, each), each) for each in steps)
        due += [events.StepKey(run_id, attempt, each) for attempt, each in found if attempt is not None]
    return list(dict.fromkeys(due))[:room]


def _make(context: ServiceContext, key: events.StepKey, policy: ProbePolicyBody) -> bool:
    """Probe a step and return whether that was possible. May be repeated: an equal request finds the same probe."""
    body = schemas.ProbeCreate(
        step=key.step,
        attempt=key.attempt,
        scorers=policy.scorers,
        accelerator=policy.accelerator,
        max_rollouts=policy.rollouts,
    )
    probe_id = None
    try:
        probe_id = service.request_probe(context, _SERVICE, key.run_id, body)[0].id
    except (ProblemError, errors.InvalidRolloutsError) as error:
        if isinstance(error, ProblemError) and error.status >= 500:
            raise  # The decoders are busy or the store is away: the next round tries again.
        _logger.info("step %d of run %s cannot be probed: %s", key.step, key.run_id, error)
    row = {**key._asdict(), "probe_id": probe_id}
    context.database.write(lambda session: engine.insert_if_absent(session, tables.PolicyProbe, row))
    return probe_id is not None


@router.get("")
def read_probe_policy(
    run: runs.RunIdentifier, context: Context, principal: security.Reader
) -> probes.ProbePolicyRecord:
    """Return which steps of the run are probed automatically."""
    with context.database.read() as session:
        return read_policy(session, principal, run)


@router.put("")
def set_probe_policy(
    run: runs.RunIdentifier, body: ProbePolicyBody, context: Context, principal: security.Administrator
) -> probes.ProbePolicyRecord:
    """Set which steps are probed automatically; fields left out get their defaults."""
    service.check_scorers(schemas.ProbeCreate(step=0, scorers=body.scorers))
    policy = body.model_dump(mode="json")

    def store(session: Session) -> probes.ProbePolicyRecord:
        found = lock_run(session, principal, run)
        stored = session.get(tables.ProbePolicy, run)
        before = None if stored is None else stored.policy
        row = {"run_id": run, "policy": policy, "changed_at_us": now_us()}
        engine.upsert(session, tables.ProbePolicy, [row], ("run_id",))
        session.expire_all()
        audit.record(
            session, principal, "probe-policy.set", run, project=found.project, run_id=run, before=before, after=policy
        )
        return read_policy(session, principal, run)

    return context.database.write(store)
