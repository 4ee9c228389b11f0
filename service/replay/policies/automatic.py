"""Make the probes that the policies of runs ask for, a few at a time, until a run's budget is spent."""

from __future__ import annotations

import logging
from functools import partial

from sqlalchemy.orm import Session

from foreshock.errors import InvalidRolloutsError
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.policies import repository
from foreshock_service.replay.policies.schemas import ProbePolicyBody
from foreshock_service.replay.policies.service import Budget, budget_of, policy_of
from foreshock_service.replay.probes.job_transitions import JobState, cancel
from foreshock_service.replay.probes.schemas import ProbeCreate
from foreshock_service.replay.probes.service import create_probe, lock_jobs
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.step_key import StepKey

UNFINISHED_AT_ONCE = 4
"""Automatic probes of a run that wait or run at the same time: a budget is exceeded by them at most."""

# Probes made in one round of all runs: each reads the rollouts of its step.
_MADE_AT_ONCE = 8
_SERVICE = Principal(None, None, frozenset())
_logger = logging.getLogger(__name__)


def make_automatic_probes(context: ServiceContext) -> int:
    """Make the probes that are due, end those that wait in vain for a spent budget, and return how many were made."""
    with context.database.read() as session:
        runs = repository.runs_with_policy(session)
    made = 0
    for run_id in runs:
        if made >= _MADE_AT_ONCE:
            break
        with context.database.read() as session:
            policy = policy_of(repository.find(session, run_id))
            if not policy.is_on:
                continue
            # The time of all leases is summed only if it is compared with something.
            budget = budget_of(session, run_id, policy) if policy.budget_seconds is not None else Budget(None, 0.0)
            waiting = budget.is_spent and bool(repository.queued_probes(session, run_id))
            due = [] if budget.is_spent else _due_steps(session, run_id, policy)
        if waiting:
            reason = f"the run's budget for probes is spent: {budget.in_words()}"
            context.database.write(partial(_end_queued, run_id=run_id, reason=reason))
        for key, cause in due[: _MADE_AT_ONCE - made]:
            made += _make(context, key, cause, policy)
    return made


def _due_steps(session: Session, run_id: str, policy: ProbePolicyBody) -> list[tuple[StepKey, str]]:
    """Return the next steps to probe with the cause, those near an alert first."""
    room = UNFINISHED_AT_ONCE - repository.unfinished(session, run_id)
    if room <= 0:
        return []
    attempts, now = attempts_of_run(session, run_id), database_now_us(session)
    due: dict[StepKey, str] = {}
    if policy.on_alerts:
        due |= dict.fromkeys(repository.steps_near_alerts(session, run_id, attempts, now, room), "alert")
    if policy.every_steps is not None:
        by_interval = repository.steps_by_interval(session, run_id, attempts, policy.every_steps, now, room)
        due |= {key: "step" for key in by_interval if key not in due}
    return list(due.items())[:room]


def _make(context: ServiceContext, key: StepKey, cause: str, policy: ProbePolicyBody) -> bool:
    """Probe a step; return whether that was possible. An equal request finds the same probe, so it may be repeated."""
    body = ProbeCreate(
        step=key.step,
        attempt=key.attempt,
        scorers=policy.scorers,
        accelerator=policy.accelerator,
        max_rollouts=policy.rollouts,
    )
    probe_id, problem = None, None
    try:
        probe_id = create_probe(context, _SERVICE, key.run_id, body)[0].id
    except (ProblemError, InvalidRolloutsError) as error:
        if isinstance(error, ProblemError) and error.status >= 500:
            raise  # The decoders are busy or the store is away: the next round tries again.
        problem = str(error)
        _logger.info("step %d of run %s cannot be probed: %s", key.step, key.run_id, problem)
    context.database.write(
        lambda session: repository.add(session, key, cause, probe_id, problem, database_now_us(session))
    )
    return probe_id is not None


def _end_queued(session: Session, run_id: str, reason: str) -> None:
    now = database_now_us(session)
    for made in repository.queued_probes(session, run_id):
        assert made.probe_id is not None
        for job in lock_jobs(session, made.probe_id):
            if job.state == JobState.QUEUED:
                cancel(job, None, JobState.SKIPPED, reason, now)
        made.problem = reason
    session.flush()
