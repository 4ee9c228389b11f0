"""The diagnosis of runs: computed in the transaction that changes what it is about, stored, and served.

A transaction notes which runs it changes, and computes each once, last. Three changes come without one: a step that
waits for shards, a run of a database without diagnoses, and another judge; a periodic job looks for these.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from fastapi import APIRouter
from sqlalchemy import bindparam, case, func, select
from sqlalchemy.orm import Session

from foreshock.api.diagnosis import Diagnosis, DiagnosisCause, MissingData
from foreshock.clock import now_us
from foreshock.comparisons import STEP_ROW
from foreshock.diagnosis.diagnose import (
    NEWEST_STEPS,
    WINDOW_STEPS,
    AwaitedShards,
    History,
    PastAlert,
    SteppedValues,
    diagnose,
)
from foreshock.diagnosis.quantities import REWARD_KEY, names_of, quantities_of
from foreshock.diagnosis.wording import plural
from foreshock.lint import CHECKS
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.session import before_commit
from foreshock_service.platform.database.tables import (
    Alert,
    DetectorSnapshot,
    Run,
    Step,
    StoredDiagnosis,
    StoredFinding,
)
from foreshock_service.platform.security import Reader
from foreshock_service.runs import diagnoses, events, measurements, run_endpoints, runs
from foreshock_service.runs.attempts import AttemptStart, active_attempt_of, attempts_of_run
from foreshock_service.runs.scalars import scalars_of_active_steps
from foreshock_service.runs.steps import missing_shards_of

WAIT_SECONDS: Final = 30.0
"""A step whose shards do not come for so long is named; before the first complete step, at once."""

_MOST_ALERTS = 100
_MOST_AWAITED = 3
_LEAST_INFO_STEPS = 3
_AT_ONCE = 100

_STANDING = Alert.state.in_(("open", "acknowledged"))
_ALERTS = (
    select(
        Alert.rule, Alert.severity, Alert.step, _STANDING, Alert.why, Alert.what_to_do, Alert.value, Alert.threshold,
        Alert.evidence, Alert.attempt,
    )
    .where(Alert.run_id == bindparam("run_id"), Alert.state != "retracted")
    .order_by(case((_STANDING, 0), else_=1), Alert.step.desc(), Alert.rule)
    .limit(_MOST_ALERTS)
)  # fmt: skip
_OBSERVED = select(func.max(DetectorSnapshot.step)).where(DetectorSnapshot.run_id == bindparam("run_id"))
_FINDINGS = select(
    StoredFinding.source, StoredFinding.name, StoredFinding.title, StoredFinding.sentence, StoredFinding.remedy,
    StoredFinding.severity, StoredFinding.steps, StoredFinding.first_step, StoredFinding.newest_step,
).where(StoredFinding.run_id == bindparam("run_id"))  # fmt: skip
_AWAITED = (
    select(Step.attempt, Step.step, Step.expected_shards, Step.last_shard_at_us)
    .where(
        # As an expression, so that the few rows of the index `ix_steps_unfolded`, whose condition is the next one, are
        # read and not all steps of the run.
        Step.run_id + "" == bindparam("run_id"),
        Step.folded_shards < Step.received_shards,
        Step.closed_at_us.is_(None),
        Step.received_shards < Step.expected_shards,
        Step.last_shard_at_us < bindparam("before_us"),
    )
    .order_by(Step.step)
)
_logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/runs/{run}/diagnosis", tags=["diagnosis"])


@router.get("")
def read_diagnosis(run: run_endpoints.RunIdentifier, context: Context, principal: Reader) -> Diagnosis:
    """Return the diagnosis of a run: verdict, headline, what happened in order, causes, what to do, what is missing."""
    with context.database.read() as session:
        runs.get_run(session, principal, run)
        return diagnosis_of_run(session, run)


def diagnosis_of_run(session: Session, run_id: str) -> Diagnosis:
    """Return the stored diagnosis of a run; before it is stored, what it would be."""
    return diagnoses.find_diagnosis(session, run_id) or judge(history_of(session, run_id))


class OfRun(Protocol):
    """An event of a run."""

    @property
    def run_id(self) -> str:
        """Return the run."""
        ...


def note_change(session: Session, changed: OfRun) -> None:
    """Compute the run's diagnosis when everything else of this transaction is done. The run is locked."""
    compute_before_commit(session, changed.run_id)


def note_awaiting(session: Session, arrived: events.ShardAwaitsOthers) -> None:
    """Compute the diagnosis if it names missing shards, or if no step of the run is complete yet."""
    if diagnoses.awaits_shards(session, arrived.run_id):
        compute_before_commit(session, arrived.run_id)


def compute_before_commit(session: Session, run_id: str) -> None:
    """Compute the diagnosis last in this transaction, once."""
    before_commit(session, f"diagnosis of {run_id}", partial(_compute, run_id))


def _compute(run_id: str, session: Session) -> None:
    session.flush()
    run = runs.find_run(session, run_id)
    if run is None or run.deleted_at_us is not None:
        return
    history = history_of(session, run_id)
    diagnoses.store_diagnosis(session, run_id, judge(history), awaits_shards=bool(history.awaited))


def judge(history: History) -> Diagnosis:
    """Return the diagnosis; an error of the judge stops nothing and is said."""
    try:
        return diagnose(history)
    except Exception:
        _logger.exception("a run could not be diagnosed")
        failed = MissingData(sentence="this run could not be diagnosed", what_to_do="Read the log of the service.")
        headline = f"Unknown: {failed.sentence}."
        return Diagnosis(verdict="unknown", headline=headline, missing=(failed,), observed_step=history.observed_step)


def diagnose_due_runs(context: ServiceContext) -> int:
    """Compute the diagnoses that no transaction does; return how many. For the sweeper."""
    with context.database.read() as session:
        due = {*diagnoses.runs_to_judge(session, _AT_ONCE), *_newly_waiting(session, now_us(), _AT_ONCE)}
    for run_id in sorted(due):
        context.database.write(partial(_compute_locked, run_id))
    return len(due)


def _compute_locked(run_id: str, session: Session) -> None:
    if runs.lock_run_for_background(session, run_id) is not None:
        _compute(run_id, session)


def _newly_waiting(session: Session, at_us: int, limit: int) -> Sequence[str]:
    """Return runs of which a step waits for shards that their diagnosis does not name yet."""
    query = (
        select(Step.run_id)
        .join(Run, Run.id == Step.run_id)
        .join(StoredDiagnosis, StoredDiagnosis.run_id == Step.run_id)
        .where(Step.folded_shards < Step.received_shards, Step.closed_at_us.is_(None))
        .where(Step.received_shards < Step.expected_shards, Step.last_shard_at_us < at_us - int(WAIT_SECONDS * 1e6))
        .where(Run.deleted_at_us.is_(None), StoredDiagnosis.awaits_shards.is_(False))
    )
    return session.scalars(query.distinct().limit(limit)).all()


def history_of(session: Session, run_id: str) -> History:
    """Return what the diagnosis reads of a run."""
    attempts = attempts_of_run(session, run_id)
    observed = session.scalar(_OBSERVED, {"run_id": run_id})
    columns = ("k3_kl", "tokens", "reward_mean", "response_length_mean")
    rows = measurements.newest_rows(session, run_id, attempts, columns, WINDOW_STEPS)
    measured = [(step, k3, tokens) for step, comparison, k3, tokens, *_ in rows if comparison != STEP_ROW]
    measured = [each for each in measured if each[1] is not None]
    of_steps = [(step, reward, length) for step, comparison, _, _, reward, length in rows if comparison == STEP_ROW]
    reward = _stepped((step, value) for step, value, _ in of_steps)
    if not reward.values and observed is not None:
        reward = _reported_reward(session, run_id, attempts, observed)
    newest_step = of_steps[-1][0] if of_steps else None
    causes, undeclared = _causes(session, run_id, newest_step)
    return History(
        alerts=_alerts(session, run_id, attempts),
        observed_step=observed,
        newest_step=newest_step,
        k3=_stepped((step, k3) for step, k3, _ in measured),
        tokens=[int(tokens or 0) for _, _, tokens in measured],
        reward=reward,
        length=_stepped((step, value) for step, _, value in of_steps),
        causes=causes,
        undeclared=undeclared,
        awaited=_awaited(session, run_id, attempts, observed),
    )


def _stepped(values: Iterable[tuple[int, float | None]]) -> SteppedValues:
    known = {step: value for step, value in values if value is not None}
    return SteppedValues(list(known), list(known.values()))


def _reported_reward(session: Session, run_id: str, attempts: Sequence[AttemptStart], observed: int) -> SteppedValues:
    """Return the reward that the trainer reports as a scalar, of the newest steps."""
    run = runs.find_run(session, run_id)
    declared = (run.scalar_names if run is not None else None) or {}
    names, bounds = names_of([REWARD_KEY], declared), (max(0, observed - WINDOW_STEPS + 1), observed)
    found = scalars_of_active_steps(session, run_id, attempts, names, bounds)
    read = {step: quantities_of(scalars, declared, {REWARD_KEY}) for step, scalars in sorted(found.items())}
    known = {step: values[REWARD_KEY] for step, values in read.items() if REWARD_KEY in values}
    return SteppedValues(list(known), list(known.values()))


def _alerts(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> tuple[PastAlert, ...]:
    """Return the alerts of active steps that were not retracted: the open ones, then the newest others."""
    found = session.execute(_ALERTS, {"run_id": run_id}).all()
    return tuple(
        PastAlert(row[0], row[1], row[2], bool(row[3]), *row[4:9])
        for row in found
        if active_attempt_of(attempts, row[2]) == row[9]
    )


def _causes(
    session: Session, run_id: str, newest_step: int | None
) -> tuple[tuple[DiagnosisCause, ...], tuple[MissingData, ...]]:
    """Return the causes that attributions and the lint name, and what must be declared for the lint to tell more.

    Of the lint, what the newest steps do not show any more is left out, and an info of few steps.
    """
    causes: list[DiagnosisCause] = []
    undeclared: list[MissingData] = []
    for source, name, title, sentence, remedy, severity, steps, first, newest in session.execute(
        _FINDINGS, {"run_id": run_id}
    ):
        if source == "attribution":
            causes.append(
                DiagnosisCause(name=name, sentence=f"{title}: {sentence}", source="probe", what_to_do=remedy or "")
            )
            continue
        is_over = newest_step is not None and newest <= newest_step - NEWEST_STEPS
        if is_over or (severity == "info" and steps < _LEAST_INFO_STEPS):
            continue
        if name == "sampling_not_declared":
            undeclared.append(MissingData(sentence=f"{title}: {sentence.rstrip('.')}", what_to_do=remedy or ""))
            continue
        of_all = steps == newest - first + 1 and steps > 1
        when = f"in every step since {first}" if of_all else f"in {plural(steps, 'step')}, {first} to {newest}"
        causes.append(
            DiagnosisCause(
                name=name,
                sentence=f"{title} ({when if steps > 1 else f'step {first}'}): {sentence}",
                source="lint",
                certainty="shown" if name not in CHECKS or CHECKS[name].proven else "possible",
                what_to_do=remedy or "",
                evidence={"steps": steps, "first_step": first, "newest_step": newest},
            )
        )
    return tuple(causes), tuple(undeclared)


def _awaited(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], observed: int | None
) -> tuple[AwaitedShards, ...]:
    """Return the oldest steps that wait for shards: all before the first complete step, else those that wait long."""
    before_us = now_us() - (0 if observed is None else int(WAIT_SECONDS * 1e6))
    waiting = session.execute(_AWAITED, {"run_id": run_id, "before_us": before_us + 1}).all()
    active = [row for row in waiting if active_attempt_of(attempts, row[1]) == row[0]]
    return tuple(
        AwaitedShards(
            step, missing_shards_of(session, events.StepKey(run_id, attempt, step), expected), expected, since_us
        )
        for attempt, step, expected, since_us in active[:_MOST_AWAITED]
    )
