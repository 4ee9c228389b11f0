"""Queries on decisions, acknowledgements and the progress of trainers."""

from collections.abc import Collection

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock.learning_rate.decisions import Decision
from foreshock_service.platform.database.engine import insert_rows, table_of, upsert
from foreshock_service.platform.database.tables import AdviceAcknowledgement, AdviceDecision, TrainerProgress

_decisions = table_of(AdviceDecision).c
_progress = table_of(TrainerProgress).c
_acknowledgements = table_of(AdviceAcknowledgement).c
_POLLED_STEP = select(_progress.polled_step).where(
    _progress.run_id == bindparam("run_id"), _progress.attempt == bindparam("attempt")
)
_ACKNOWLEDGED_STEP = select(func.max(_acknowledgements.step)).where(
    _acknowledgements.run_id == bindparam("run_id"), _acknowledgements.attempt == bindparam("attempt")
)
_LOG = select(_decisions.decision).where(_decisions.run_id == bindparam("run_id")).order_by(_decisions.revision)
_TRAINER_STEPS = select(_ACKNOWLEDGED_STEP.scalar_subquery(), _POLLED_STEP.scalar_subquery())


def log_of(session: Session, run_id: str) -> list[Decision]:
    """Return the run's decisions in order of revision."""
    return [Decision.from_json(decision) for decision in session.scalars(_LOG, {"run_id": run_id})]


def page_of_log(session: Session, run_id: str, after: int, limit: int) -> list[Decision]:
    """Return up to `limit` decisions with revisions above `after`, in order."""
    query = select(AdviceDecision.decision).where(AdviceDecision.run_id == run_id, AdviceDecision.revision > after)
    found = session.scalars(query.order_by(AdviceDecision.revision).limit(limit))
    return [Decision.from_json(decision) for decision in found]


def logs_of_runs(session: Session, run_ids: Collection[str]) -> dict[str, list[Decision]]:
    """Return the decisions of each run that has any, in order of revision."""
    query = select(AdviceDecision.run_id, AdviceDecision.decision).where(AdviceDecision.run_id.in_(run_ids))
    logs: dict[str, list[Decision]] = {}
    for run_id, decision in session.execute(query.order_by(AdviceDecision.run_id, AdviceDecision.revision)):
        logs.setdefault(run_id, []).append(Decision.from_json(decision))
    return logs


def append(session: Session, run_id: str, decision: Decision) -> None:
    """Add a decision; the revision is the primary key, so no two can have the same."""
    row = {
        "run_id": run_id,
        "revision": decision.revision,
        "attempt": decision.attempt,
        "kind": decision.kind,
        "effective_from_step": decision.effective_from_step,
        "reason": decision.reason,
        "author": decision.author,
        "made_at_us": decision.at_us,
        "decision": decision.to_json(),
    }
    insert_rows(session, AdviceDecision, [row])


def newest_version(session: Session, run_id: str) -> tuple[int, int]:
    """Return (attempt, revision) of the newest decision, as `fold` has them; (1, 0) before any."""
    query = select(AdviceDecision.attempt, AdviceDecision.revision).where(AdviceDecision.run_id == run_id)
    row = session.execute(query.order_by(AdviceDecision.revision.desc()).limit(1)).first()
    return (1, 0) if row is None else (row[0], row[1])


def trainer_step(session: Session, run_id: str, attempt: int) -> int:
    """Return the newest step that a trainer of this attempt asked for as a follower, or acknowledged; −1 before any."""
    steps = session.execute(_TRAINER_STEPS, {"run_id": run_id, "attempt": attempt}).one()
    return max((-1 if step is None else step for step in steps), default=-1)


def polled_step(session: Session, run_id: str, attempt: int) -> int:
    """Return the newest step that a following trainer asked for; −1 before any."""
    polled = session.scalar(_POLLED_STEP, {"run_id": run_id, "attempt": attempt})
    return -1 if polled is None else polled


def put_polled_step(session: Session, run_id: str, attempt: int, step: int) -> None:
    """Store the newest step that a following trainer asked for."""
    row = {"run_id": run_id, "attempt": attempt, "polled_step": step}
    upsert(session, TrainerProgress, [row], ("run_id", "attempt"))


def put_acknowledgement(session: Session, row: dict[str, object]) -> None:
    """Store the learning rate used at a step, overwriting an older report."""
    upsert(session, AdviceAcknowledgement, [row], ("run_id", "attempt", "step"))


def newest_acknowledgement(session: Session, run_id: str) -> AdviceAcknowledgement | None:
    """Return the last acknowledgement of the newest attempt's trainer; None before any."""
    query = select(AdviceAcknowledgement).where(AdviceAcknowledgement.run_id == run_id)
    ordered = query.order_by(AdviceAcknowledgement.attempt.desc(), AdviceAcknowledgement.step.desc())
    return session.scalar(ordered.limit(1))
