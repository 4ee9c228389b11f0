"""The diagnosis of runs: computed from what is stored, as the last part of advancing a run, and served."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import and_, bindparam, case, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock import clock, comparisons
from foreshock.api.diagnosis import Diagnosis, MissingData
from foreshock.api.watch import STANDING
from foreshock.diagnosis import lags, mismatch_rules
from foreshock.diagnosis.beside_fall import newest_fall
from foreshock.diagnosis.causes import REWARD_RULES
from foreshock.diagnosis.course import FIRST_STEP, FIRST_STEPS
from foreshock.diagnosis.diagnose import JUDGE_VERSION, diagnose
from foreshock.diagnosis.findings import PastFinding, ToldFindings, tell_findings
from foreshock.diagnosis.history import NEWEST_STEPS, WINDOW_STEPS, AwaitedShards, History, PastAlert, SteppedValues
from foreshock.diagnosis.largest_token import without_largest_token
from foreshock.diagnosis.quantities import (
    GRADIENT_NORM_KEY,
    LARGEST_D_KEY,
    LEARNING_RATE_KEY,
    MEAN_D_KEY,
    REWARD_KEY,
    names_of,
    quantities_of,
)
from foreshock.diagnosis.reward import COLLAPSE_RULE
from foreshock.diagnosis.source_rewards import LEAST_FALL
from foreshock.lint.checks.sampling import RAW
from foreshock_service.platform import parameters
from foreshock_service.platform.database import engine, tables
from foreshock_service.runs import (
    attempts,
    changes,
    checkpoints,
    diagnoses,
    lint,
    measurements,
    runs,
    scalars,
)
from foreshock_service.runs.steps import missing_shards_of

WAIT_SECONDS: Final = 30.0
"""A step that waits this long for shards is named in the diagnosis; before the first complete step, at once."""

_OF_STEP = (
    "reward_mean", "response_length_mean", "truncated_fraction", "finished_reward_mean", "num_tool_tokens",
    "num_rollouts", "entropy_mean",
)  # fmt: skip
_LAG_KEYS = (*lags.K3_KEYS.values(), *lags.TOKENS_KEYS.values())
_OF_MISMATCH = ("k3_kl", "tokens", "min_d", "max_d", *(key.partition(":")[2] for key in _LAG_KEYS))
_MISMATCH_KEYS = tuple(f"{comparisons.TRAINER_ROLLOUT}:{measure}" for measure in _OF_MISMATCH)

_MOST_AWAITED = 3
_MOST_CHANGES = 20
_EVALUATED_STEPS = 640
"""Newest steps whose evaluations are read: a dozen if there is one in 50 steps. Of 50 scalars a step it takes 10 ms, so
that a run without evaluations is spared it."""
_NEWEST_RATES = 3
_OF_FINDING = ("source", "name", "severity", "title", "sentence", "steps", "first_step", "newest_step")
_AT_ONCE = 100
_MOST_RESOLVED = 100

_logger = logging.getLogger(__name__)

router = parameters.api_router(prefix="/v1/runs/{run}/diagnosis", tags=["diagnosis"])


@router.get("")
def read_diagnosis(asked: runs.RunToRead) -> Diagnosis:
    """Return the diagnosis of a run: verdict, headline, what happened in order, causes, what to do, what is missing."""
    with asked.reading() as session:
        return diagnosis_of_run(session, asked.run)


def diagnosis_of_run(session: Session, run_id: str) -> Diagnosis:
    """Return the stored diagnosis of a run; compute it if none is stored yet."""
    return diagnoses.find_diagnosis(session, run_id) or judge(history_of(session, run_id))


def diagnosis_to_store(session: Session, run_id: str) -> tuple[Diagnosis, bool]:
    """Return the diagnosis of a run by what is stored now, and whether it names missing shards."""
    try:
        history = history_of(session, run_id)
    except SQLAlchemyError:
        raise
    except Exception:
        _logger.exception("the history of run %s could not be read", run_id)
        return _failed(None), False
    return judge(history), bool(history.awaited)


def judge(history: History) -> Diagnosis:
    """Return the diagnosis. An error is logged and makes the diagnosis unknown: it must not keep the step open."""
    try:
        return diagnose(history)
    except Exception:
        _logger.exception("a run could not be diagnosed")
        return _failed(history.observed_step)


def _failed(observed_step: int | None) -> Diagnosis:
    failed = MissingData(sentence="this run could not be diagnosed", what_to_do="Read the log of the service.")
    headline = f"Unknown: {failed.sentence}."
    return Diagnosis(
        verdict="unknown", headline=headline, short=headline, missing=(failed,), observed_step=observed_step
    )


def history_of(session: Session, run_id: str) -> History:
    """Return the inputs of a run's diagnosis."""
    run = session.get_one(tables.Run, run_id)
    observed = session.scalar(_OBSERVED, {"run_id": run_id})
    # A run of scalars has no step to read: a query less in each of its steps.
    has_rollouts = run.last_shard_at_us is not None
    columns = (*_OF_STEP, *_OF_MISMATCH)
    rows = measurements.newest_rows(session, run_id, columns, WINDOW_STEPS) if has_rollouts else []
    first = 2 + len(_OF_STEP)
    of_start = _of_start(session, run_id, rows)
    of_steps = [
        (row[0], dict(zip(_OF_STEP, row[2:first], strict=True))) for row in rows if row[1] == comparisons.STEP_ROW
    ]
    measured = [(row[0], row[first:]) for row in rows if row[1] != comparisons.STEP_ROW and row[first] is not None]
    of_others = [_of_others(values) for _, values in measured]
    series = {name: _stepped((step, values[name]) for step, values in of_steps) for name in _OF_STEP}
    reward, reported = series["reward_mean"], dict[str, float]()
    if observed is not None and not (reward.values and measured):
        of_scalars = _reported(session, run, observed)
        if not reward.values:
            reward = _stepped((step, values.get(REWARD_KEY)) for step, values in of_scalars.items())
        if not measured:
            reported = next((each for each in reversed(of_scalars.values()) if mismatch_rules.K3 in each), {})
    evaluations = _evaluations(session, run, observed)
    findings = _findings(
        session, run_id, [step for step, _ in of_steps], has_entropy=bool(series["entropy_mean"].values)
    )
    remarks = [MissingData(sentence=each.rstrip(".")) for each in attempts.remarks_of_hooks(session, run_id)]
    # Alerts of active steps: the open ones, then the newest resolved ones.
    alerts = tuple(
        PastAlert(row.rule, row.severity, row.step, bool(row[0]), *row[4:10])
        for row in session.execute(_PAST_ALERTS, {"run_id": run_id})
        if attempts.is_active(session, row)
    )
    # Only the way back from a collapse reads the checkpoints; other diagnoses are spared the query.
    has_collapsed = any(each.is_open and each.rule == COLLAPSE_RULE for each in alerts)
    fall = min((each.onset for each in alerts if each.is_open and each.rule in REWARD_RULES), default=None)
    resumes = [each.resume_step for each in attempts.attempts_of_run(session, run_id)[1:]]
    over = newest_fall(alerts, min(reward.steps, default=0))
    return History(
        alerts=alerts,
        observed_step=observed,
        newest_step=of_steps[-1][0] if of_steps else None,
        k3=_stepped((step, values[0]) for step, values in measured),
        tokens=[int(values[1] or 0) for _, values in measured],
        k3_of_others=[k3 for k3, _ in of_others],
        lags=[of_step for _, of_step in of_others],
        first_k3=_stepped((step, _of_others(values)[0]) for step, values in of_start),
        first_lags=[_of_others(values)[1] for _, values in of_start],
        reported=reported,
        reward=reward,
        evaluations=evaluations,
        rates=_rates(session, run, observed, fall),
        gradients=_about_fall(session, run, GRADIENT_NORM_KEY, over.onset if fall is None and over else fall),
        entropy=series["entropy_mean"],
        length=series["response_length_mean"],
        truncated=series["truncated_fraction"],
        finished_reward=series["finished_reward_mean"],
        tool_tokens=_stepped(
            (step, values["num_tool_tokens"] / values["num_rollouts"])
            for step, values in of_steps
            if values["num_rollouts"]
        ),
        sources=_sources(session, run_id, fall, reward, observed) if has_rollouts else {},
        prompts=_prompts(session, run_id, resumes, of_steps[0][0]) if of_steps else {},
        causes=findings.causes,
        undeclared=findings.undeclared,
        unlogged=(*findings.unlogged, *remarks),
        awaited=_awaited(session, run_id, observed) if has_rollouts else (),
        model_kind=run.model_kind,
        checkpoints=checkpoints.announced_steps(session, run_id) if has_collapsed else (),
        resumes=resumes,
        changes=changes.newest_changes(session, run_id, _MOST_CHANGES) if has_rollouts else (),
    )


def _of_start(session: Session, run_id: str, newest: Sequence[Sequence[Any]]) -> list[tuple[int, Sequence[Any]]]:
    """Return (step, columns of the mismatch) of the first measured steps, if they are before the newest ones."""
    if not newest or newest[0][0] <= FIRST_STEP:
        return []
    rows = measurements.first_rows(session, run_id, _OF_MISMATCH, FIRST_STEPS)
    return [(row[0], row[1:]) for row in rows if row[0] < newest[0][0] and row[1] is not None]


def _of_others(values: Sequence[float | None]) -> tuple[float, lags.StepLags]:
    """Return k3 and the lags of a step without its largest token, from the columns of `_OF_MISMATCH`.

    A step without versions has no lags. If rounding hides the other tokens, k3 is that of all.
    """
    known = {key: value for key, value in zip(_MISMATCH_KEYS, values, strict=True) if value is not None}
    judged = without_largest_token(known)
    return judged.get(mismatch_rules.K3, known.get(mismatch_rules.K3, math.nan)), lags.StepLags.of(judged)


def _stepped(values: Iterable[tuple[int, float | None]]) -> SteppedValues:
    known = {step: value for step, value in values if value is not None}
    return SteppedValues(list(known), list(known.values()))


def _reported(session: Session, run: tables.Run, observed: int) -> dict[int, dict[str, float]]:
    """Return the reward, k3 and |d| of the newest steps that the trainer reports as scalars."""
    quantities = (REWARD_KEY, mismatch_rules.K3, MEAN_D_KEY, LARGEST_D_KEY)
    declared = run.scalar_names or {}
    names = names_of(quantities, declared)
    first = max(0, observed - WINDOW_STEPS + 1)
    found = scalars.scalars_of_active_steps(session, run.id, names, first, observed)
    return {step: quantities_of(values, declared, quantities) for step, values in sorted(found.items())}


def _evaluations(session: Session, run: tables.Run, observed: int | None) -> dict[str, SteppedValues]:
    names = run.evaluation_names
    if not names or observed is None:
        return {}
    first = max(0, observed - _EVALUATED_STEPS + 1)
    found = sorted(scalars.scalars_of_active_steps(session, run.id, names, first, observed).items())
    read = {name: _stepped((step, values.get(name)) for step, values in found) for name in sorted(names)}
    return {name: values for name, values in read.items() if values.values}


def _sources(
    session: Session, run_id: str, fall: int | None, reward: SteppedValues, newest: int | None
) -> dict[int, dict[str, tuple[int, float]]]:
    """Return the rewards by data source about a fall of the reward; nothing else asks for them."""
    if (
        newest is None
        or not reward.values
        or (fall is None and not reward.best() - reward.newest() > LEAST_FALL * abs(reward.best()))
    ):
        return {}
    if fall is None:
        return lint.rewards_by_source(session, run_id, (newest - WINDOW_STEPS, newest))
    of_fall = (fall - NEWEST_STEPS, fall - 1), (max(fall, newest - NEWEST_STEPS), newest)
    return lint.rewards_by_source(session, run_id, *of_fall)


def _prompts(session: Session, run_id: str, resumes: Sequence[int], first: int) -> dict[int, list[int]]:
    """Return the hashes of the prompts of the window's steps; of all steps if the run was resumed among these."""
    return lint.prompts_by_step(session, run_id, 0 if any(each >= first for each in resumes) else first)


def _rates(session: Session, run: tables.Run, observed: int | None, fall: int | None) -> SteppedValues:
    """Return the logged rates of the newest steps if the newest is 0, else those about a fall of the reward."""
    if observed is None:
        return SteppedValues()
    if _logged(session, run, LEARNING_RATE_KEY, observed - _NEWEST_RATES + 1, observed).values[-1:] == [0.0]:
        return _logged(session, run, LEARNING_RATE_KEY, observed - _EVALUATED_STEPS + 1, observed)
    return _about_fall(session, run, LEARNING_RATE_KEY, fall)


def _about_fall(session: Session, run: tables.Run, quantity: str, fall: int | None) -> SteppedValues:
    """Return a quantity of the scalars about a fall of the reward; nothing without one."""
    if fall is None:
        return SteppedValues()
    return _logged(session, run, quantity, fall - 2 * NEWEST_STEPS, fall + NEWEST_STEPS)


def _logged(session: Session, run: tables.Run, quantity: str, first: int, last: int) -> SteppedValues:
    declared = run.scalar_names or {}
    names = names_of((quantity,), declared)
    read = scalars.scalars_of_active_steps(session, run.id, names, max(0, first), last)
    found = {step: quantities_of(values, declared, (quantity,)) for step, values in sorted(read.items())}
    return _stepped((step, values.get(quantity)) for step, values in found.items())


def _findings(session: Session, run_id: str, newest_steps: Sequence[int], *, has_entropy: bool) -> ToldFindings:
    """Return what was found in a run, in words; only with entropies may the steps together show more than each."""
    found = [
        PastFinding(remedy=row.remedy or "", **{name: getattr(row, name) for name in _OF_FINDING})
        for row in session.execute(_FINDINGS, {"run_id": run_id})
    ]
    if newest_steps and has_entropy and all(each.name != RAW.name for each in found):
        together = lint.found_together(session, run_id, newest_steps[0], newest_steps[-1])
        found += [] if together is None else [together]
    return tell_findings(found, newest_steps, lambda first: lint.checked_steps(session, run_id, first))


def _awaited(session: Session, run_id: str, observed: int | None) -> tuple[AwaitedShards, ...]:
    """Return the oldest steps that wait for shards: those that wait long; before the first complete step, any."""
    before_us = clock.now_us() - (0 if observed is None else int(WAIT_SECONDS * 1e6))
    waiting = session.scalars(_WAITING, {"run_id": run_id, "before_us": before_us + 1})
    active = [each for each in waiting if attempts.is_active(session, each)]
    return tuple(
        AwaitedShards(
            each.step,
            missing_shards_of(session, each, each.expected_shards),
            each.expected_shards,
            each.last_shard_at_us,
        )
        for each in active[:_MOST_AWAITED]
    )


# Built once: they are executed at each step, and building one takes longer than executing it.
_OBSERVED = select(func.max(tables.DetectorSnapshot.step)).where(tables.DetectorSnapshot.run_id == bindparam("run_id"))
"""Newest step that the detectors have seen."""
_FINDINGS = select(engine.table_of(tables.StoredFinding)).where(tables.StoredFinding.run_id == bindparam("run_id"))
_STANDING = tables.Alert.state.in_(STANDING)
_NEWEST_RESOLVED = (
    select(tables.Alert.id)
    .where(tables.Alert.run_id == bindparam("run_id"), tables.Alert.state == "resolved")
    .order_by(tables.Alert.step.desc(), tables.Alert.rule)
    .limit(_MOST_RESOLVED)
)
_COLUMNS_OF_ALERTS = (
    "rule", "severity", "step", "why", "what_to_do", "value", "threshold", "evidence", "cleared_step", "attempt",
    "run_id",
)  # fmt: skip
_PAST_ALERTS = (
    select(_STANDING, *(getattr(tables.Alert, name) for name in _COLUMNS_OF_ALERTS))
    .where(tables.Alert.run_id == bindparam("run_id"), or_(_STANDING, tables.Alert.id.in_(_NEWEST_RESOLVED)))
    .order_by(case((_STANDING, 0), else_=1), tables.Alert.step.desc(), tables.Alert.rule)
)
_WAITING = (
    select(tables.Step)
    .where(
        # An expression, so that SQLite reads the few rows of the index `ix_steps_unfolded` (its condition is the next
        # line) and not all steps of the run.
        tables.Step.run_id + "" == bindparam("run_id"),
        tables.Step.folded_shards < tables.Step.received_shards,
        tables.Step.closed_at_us.is_(None),
        tables.Step.received_shards < tables.Step.expected_shards,
        tables.Step.last_shard_at_us < bindparam("before_us"),
    )
    .order_by(tables.Step.step)
)


def runs_to_diagnose(session: Session) -> set[str]:
    """Return runs that time or a new release makes due, up to 100 of either.

    They are those without a diagnosis of this judge, the newest first, except those that have ended with an older one;
    and those with a step that waits long for shards which their diagnosis does not name.
    """
    stored, run, step = tables.StoredDiagnosis, tables.Run, tables.Step
    is_older = and_(stored.judged_by != JUDGE_VERSION, run.state.not_in(runs.ENDED))
    to_judge = select(run.id).outerjoin(stored, stored.run_id == run.id)
    to_judge = to_judge.where(run.deleted_at_us.is_(None), or_(stored.run_id.is_(None), is_older))
    before_us = clock.now_us() - int(WAIT_SECONDS * 1e6)
    waiting = select(step.run_id).distinct().join(run, run.id == step.run_id).join(stored, stored.run_id == run.id)
    waiting = waiting.where(
        step.folded_shards < step.received_shards,
        step.closed_at_us.is_(None),
        step.received_shards < step.expected_shards,
        step.last_shard_at_us < before_us,
        run.deleted_at_us.is_(None),
        stored.awaits_shards.is_(False),
    )
    found = session.scalars(to_judge.order_by(run.created_at_us.desc(), run.id).limit(_AT_ONCE)).all()
    return {*found, *session.scalars(waiting.limit(_AT_ONCE))}
