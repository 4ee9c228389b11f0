"""Read and set the policy of a run's automatic probes."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.audit.service import record
from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.database.tables import ProbePolicy
from foreshock_service.platform.security import Principal
from foreshock_service.replay.policies import repository
from foreshock_service.replay.policies.schemas import PolicyState, ProbePolicyBody, ProbePolicyRead
from foreshock_service.replay.probes.schemas import ProbeCreate
from foreshock_service.replay.probes.service import check_scorers
from foreshock_service.runs.runs.service import get_run, lock_run


@dataclass(frozen=True, slots=True)
class Budget:
    """The accelerator seconds that a run's probes may use (None: no limit), and those that they used."""

    seconds: float | None
    spent_seconds: float

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.seconds is not None and self.spent_seconds >= self.seconds

    def in_words(self) -> str:
        """Return what was used of the budget."""
        used = f"{self.spent_seconds:.3g} s"
        return used if self.seconds is None else f"{used} of {self.seconds:g} s"


def read_policy(session: Session, principal: Principal, run_id: str) -> ProbePolicyRead:
    """Return the run's policy with what its probes have cost. Raises RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    stored = repository.find(session, run_id)
    policy = policy_of(stored)
    budget = budget_of(session, run_id, policy)
    state: PolicyState = "off" if not policy.is_on else "budget_spent" if budget.is_spent else "active"
    automatic, impossible = repository.counts(session, run_id)
    return ProbePolicyRead(
        **policy.model_dump(),
        state=state,
        note=_NOTES[state].format(used=budget.in_words()),
        spent_seconds=budget.spent_seconds,
        automatic_probes=automatic,
        impossible_steps=impossible,
        changed_at_us=stored.changed_at_us if stored is not None else None,
    )


def policy_in_words(session: Session, principal: Principal, run_id: str) -> str | None:
    """Return the state of the run's automatic probes; None if there never were any. Raises RunNotFound, RunDeleted."""
    if repository.find(session, run_id) is None:
        return None
    return read_policy(session, principal, run_id).note


def set_policy(session: Session, principal: Principal, run_id: str, body: ProbePolicyBody) -> None:
    """Set the run's policy. Raises RunNotFound, RunDeleted, UnknownScorer, ProbeNotPossible."""
    check_scorers(ProbeCreate(step=0, scorers=body.scorers))
    run = lock_run(session, principal, run_id)
    stored, policy = repository.find(session, run_id), body.model_dump(mode="json")
    before = stored.policy if stored is not None else None
    if stored is None:
        session.add(ProbePolicy(run_id=run_id, policy=policy, changed_at_us=now_us()))
    else:
        stored.policy, stored.changed_at_us = policy, now_us()
    record(
        session, principal, "probe-policy.set", run.id, project=run.project, run_id=run.id, before=before, after=policy
    )
    session.flush()


def policy_of(stored: ProbePolicy | None) -> ProbePolicyBody:
    """Return the policy as it was set; without a row, one that probes nothing."""
    return ProbePolicyBody() if stored is None else ProbePolicyBody.model_validate(stored.policy)


def steps_between_probes(session: Session, run_id: str) -> int | None:
    """Return `every_steps` of the run's policy, whether or not its budget is spent; None: it probes no n-th step."""
    return policy_of(repository.find(session, run_id)).every_steps


def budget_of(session: Session, run_id: str, policy: ProbePolicyBody) -> Budget:
    """Return the budget of a run with the time that workers have held its jobs."""
    return Budget(policy.budget_seconds, repository.spent_us(session, run_id, database_now_us(session)) / 1e6)


_NOTES = {
    "off": "No automatic probes: {used} used.",
    "active": "Automatic probes are on: {used} used.",
    "budget_spent": "Automatic probes have stopped, their budget is spent: {used} used. Raise budget_seconds to go on.",
}
