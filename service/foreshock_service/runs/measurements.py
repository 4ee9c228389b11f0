"""Measurements: all measures of one comparison at one step, stored when the step closes or is scored."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from sqlalchemy import ColumnElement, and_, case, func, select, tuple_
from sqlalchemy.orm import Session, aliased

from foreshock import clock, comparisons, errors, json_values
from foreshock.measures import comparison_statistics, pooling, registry, rollout_summaries
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.scorers import SCORERS, VARIANTS, score_name
from foreshock_service.platform import problem
from foreshock_service.platform.database import engine, tables
from foreshock_service.runs import attempts, events, shard_decoding

_FIRST_REVISION = {"revision": 1, "rewritten": 1}
_UNMEASURED: dict[str, float | None] = dict.fromkeys(measure.column for measure in registry.MEASURES)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measures of one comparison at one active step, by column; None if not estimable."""

    key: events.StepKey
    values: dict[str, float | None]


class MeasurementNotFound(problem.ProblemError, status=404, problem_type="measurement-not-found"):
    """Missing measurement: the step lacks the comparison, or has not closed yet."""


class StatisticsOutOfDate(problem.ProblemError, status=409, problem_type="statistics-out-of-date"):
    """Outdated statistics: measured by another release, and unreadable by this one."""


class UnknownComparison(problem.ProblemError, status=422, problem_type="unknown-comparison"):
    """Unknown comparison: not `target/behaviour` of two scorers."""


def check_comparison(name: str) -> None:
    """Raise UnknownComparison unless the name is `target/behaviour` of two different scores."""
    scores = [score_name(scorer, variant) for scorer in SCORERS for variant in VARIANTS]
    target, _, behaviour = name.partition("/")
    if target not in scores or behaviour not in scores or target == behaviour:
        known = [comparisons.comparison_name(first, second) for first in scores for second in scores if first != second]
        scorers = ", ".join(SCORERS)
        raise UnknownComparison(
            f"query.comparison: unknown comparison {name!r}{errors.did_you_mean(name, known)} "
            f"(target/behaviour of {scorers})"
        )


def store_measurements(
    session: Session, step: events.StepKey, folded: Sequence[shard_decoding.FoldedStatistics]
) -> None:
    """Store (or overwrite) measures and statistics of comparisons at one step, NaN as NULL. The run is locked."""
    now = clock.now_us()
    shown_step = step.step if attempts.is_active(session, step) else -1
    rows, statistics, newest = [], [], []
    for each in folded:
        key = {**step._asdict(), "comparison": each.comparison}
        measured = {
            column: float(value)
            for column, value in each.measures.items()
            if column in _UNMEASURED and not math.isnan(value)
        }
        rows.append({**key, **_UNMEASURED, **measured, "from_sample": each.from_sample, "computed_at_us": now})
        blobs = {"statistics": each.statistics, "summaries": each.summaries}
        statistics.append({**key, "statistics_version": each.statistics_version, **blobs})
        shown = {"shown_attempt": step.attempt, "shown_step": shown_step, "buckets": each.buckets}
        newest.append({**key, **shown, **_FIRST_REVISION})
    engine.upsert(session, tables.measurements, rows, tables.MEASUREMENT_KEY)
    engine.upsert(session, tables.MeasurementStatistics, statistics, tables.MEASUREMENT_KEY)
    if newest:
        session.execute(_noting(engine.insert_for(session, engine.table_of(tables.NewestMeasurement))), newest)


# Cached: this saves a millisecond per step.
@cache
def _noting(statement: Any) -> Any:
    new, old = statement.excluded, statement.table.c
    # A late shard of the newest step measures it again.
    is_newest = tuple_(new.attempt, new.step) >= tuple_(old.attempt, old.step)
    is_newer = tuple_(new.attempt, new.step) > tuple_(old.attempt, old.step)
    is_shown = and_(new.shown_step >= 0, new.shown_step >= old.shown_step)
    columns = {"attempt": is_newest, "step": is_newest}
    columns |= dict.fromkeys(("shown_attempt", "shown_step", "buckets"), is_shown)
    changed: dict[str, ColumnElement[Any]] = {
        name: case((condition, new[name]), else_=old[name]) for name, condition in columns.items()
    }
    changed["revision"] = old.revision + 1
    changed["rewritten"] = case((is_newer, old.rewritten), else_=old.revision + 1)
    return statement.on_conflict_do_update(index_elements=["run_id", "comparison"], set_=changed)


def forget_superseded(session: Session, started: events.AttemptStarted) -> None:
    """Show the newest active step of each comparison whose shown step the new attempt superseded. The run is locked."""
    newest, table = tables.NewestMeasurement, tables.measurements.c
    active = attempts.active_rows(session, started.run_id, table)
    for row in session.scalars(select(newest).where(newest.run_id == started.run_id, newest.shown_step >= 0)).all():
        shown = events.StepKey(row.run_id, row.shown_attempt, row.shown_step)
        if attempts.is_active(session, shown):
            continue
        of_comparison = (table.run_id == row.run_id, table.comparison == row.comparison, active)
        query = select(table.attempt, table.step).where(*of_comparison).order_by(table.step.desc()).limit(1)
        row.shown_attempt, row.shown_step = session.execute(query).first() or (row.shown_attempt, -1)
        row.buckets = None
    session.flush()


def has_measurement(session: Session, key: events.StepKey, comparison: str) -> bool:
    return session.get(tables.MeasurementStatistics, (*key, comparison)) is not None


def is_out_of_date(session: Session, key: events.StepKey) -> bool:
    versions = session.scalars(select(tables.MeasurementStatistics.statistics_version).filter_by(**key._asdict()))
    return any(version != STATISTICS_VERSION for version in versions)


def is_run_out_of_date(session: Session, run_id: str) -> bool:
    """Return whether the run's oldest or newest step is out of date; steps are measured in order."""
    table = tables.MeasurementStatistics
    query = select(table.statistics_version).where(table.run_id == run_id).limit(1)
    ends = ((table.attempt, table.step), (table.attempt.desc(), table.step.desc()))
    return any(session.scalar(query.order_by(*order)) not in (None, STATISTICS_VERSION) for order in ends)


def read_statistics(
    session: Session, key: events.StepKey, comparison: str
) -> comparison_statistics.ComparisonStatistics:
    found = stored_statistics(session, key, comparison)
    return comparison_statistics.ComparisonStatistics.from_bytes(found.statistics)


def stored_statistics(session: Session, key: events.StepKey, comparison: str) -> tables.MeasurementStatistics:
    """Return the row of a comparison at a step. Raises UnknownComparison, MeasurementNotFound, StatisticsOutOfDate."""
    check_comparison(comparison)
    found = session.get(tables.MeasurementStatistics, (*key, comparison))
    if found is None:
        name = tables.measurements.c.comparison
        query = select(name).filter_by(**key._asdict()).order_by(name)
        there = ", ".join(session.scalars(query)) or "nothing yet"
        raise MeasurementNotFound(f"step {key.step} of attempt {key.attempt} has no {comparison}: measured is {there}")
    if found.statistics_version != STATISTICS_VERSION:
        raise StatisticsOutOfDate(
            f"{comparison} of step {key.step} was measured by another release (statistics of version "
            f"{found.statistics_version}, this release reads {STATISTICS_VERSION}): run `foreshock remeasure`"
        )
    return found


def measures_of_active_steps(
    session: Session, run_id: str, comparisons: Sequence[str], columns: Sequence[str], first: int, last: int
) -> dict[int, dict[tuple[str, str], float]]:
    """Return step → (comparison, column) → value, for active steps with `first` ≤ step ≤ `last`."""
    table = tables.measurements.c
    query = select(table.step, table.comparison, *(table[name] for name in columns)).where(
        table.run_id == run_id,
        table.comparison.in_(comparisons),
        attempts.active_rows(session, run_id, table, first, last),
    )
    values: defaultdict[int, dict[tuple[str, str], float]] = defaultdict(dict)
    for step, comparison, *row in session.execute(query):
        values[step] |= {
            (comparison, column): value for column, value in zip(columns, row, strict=True) if value is not None
        }
    return values


def newest_steps(
    session: Session, run_ids: Collection[str], comparison: str, columns: Sequence[str], count: int
) -> dict[str, list[MeasuredStep]]:
    """Return up to `count` of each run's newest active steps with the comparison, in step order, in one query."""
    table, inner, later = tables.measurements.c, tables.measurements.alias(), aliased(tables.Attempt)
    end = select(func.min(later.resume_step)).where(
        later.run_id == tables.Attempt.run_id, attempts.began_later(later, tables.Attempt)
    )
    newest = (
        select(inner.c.step)
        .where(
            inner.c.run_id == tables.Attempt.run_id,
            inner.c.attempt == tables.Attempt.attempt,
            inner.c.comparison == comparison,
            # Steps from the resume step of a later attempt on are superseded.
            inner.c.step < func.coalesce(end.correlate(tables.Attempt).scalar_subquery(), attempts.NO_BOUND),
        )
        .order_by(inner.c.step.desc())
        .limit(count)
        .correlate(tables.Attempt)
    )
    # An outer join, because SQLite evaluates it from left to right; else it would read every step of the runs first.
    query = (
        select(table.run_id, table.attempt, table.step, *(table[name] for name in columns))
        .select_from(tables.Attempt)
        .outerjoin(
            tables.measurements,
            (table.run_id == tables.Attempt.run_id)
            & (table.attempt == tables.Attempt.attempt)
            & (table.comparison == comparison)
            & table.step.in_(newest.scalar_subquery()),
        )
        .where(tables.Attempt.run_id.in_(run_ids))
        .order_by(table.step)
    )
    found: defaultdict[str, list[MeasuredStep]] = defaultdict(list)
    for run_id, attempt, step, *row in session.execute(query):
        if step is not None:
            values = dict(zip(columns, row, strict=True))
            found[run_id].append(MeasuredStep(events.StepKey(run_id, attempt, step), values))
    return {run_id: steps[-count:] for run_id, steps in found.items()}


def newest_rows(session: Session, run_id: str, columns: Sequence[str], count: int) -> list[tuple[Any, ...]]:
    """Return (step, comparison, the columns) of the logged comparisons of the newest `count` active steps, in order.

    More steps are returned if some lack one of the two comparisons.
    """
    table = tables.measurements.c
    logged = (comparisons.STEP_ROW, comparisons.TRAINER_ROLLOUT)
    query = select(table.step, table.comparison, *(table[name] for name in columns))
    query = query.where(table.run_id == run_id, table.comparison.in_(logged))
    query = query.order_by(table.step.desc(), table.comparison)
    ranges = attempts.active_ranges(attempts.attempts_of_run(session, run_id))
    found: list[tuple[Any, ...]] = []
    # The newest attempt alone is read without a sort; all earlier attempts together take one more query.
    for part in (ranges[:1], ranges[1:]):
        if part and len(found) < 2 * count:
            rows = session.execute(query.where(attempts.in_ranges(part, table)).limit(2 * count - len(found)))
            found += [tuple(row) for row in rows]
    return found[::-1]


_LAST_OF_FIRST_STEPS = 256


def first_rows(session: Session, run_id: str, columns: Sequence[str], count: int) -> list[tuple[Any, ...]]:
    """Return (step, the columns) of trainer/rollout at the first `count` active steps, in order; none is above 256."""
    table = tables.measurements.c
    # Bounded, so that a long run of many attempts is not sorted whole.
    active = attempts.active_rows(session, run_id, table, 0, _LAST_OF_FIRST_STEPS)
    query = select(table.step, *(table[name] for name in columns)).where(
        table.run_id == run_id, table.comparison == comparisons.TRAINER_ROLLOUT, active
    )
    return [tuple(row) for row in session.execute(query.order_by(table.step).limit(count))]


def blobs_of_steps(
    session: Session, keys: Collection[events.StepKey], comparison: str, blob: Literal["statistics", "summaries"]
) -> dict[events.StepKey, bytes]:
    """Return the folded statistics or the rollout summaries of these steps that this release can read, in one query."""
    table = tables.MeasurementStatistics
    query = select(table.run_id, table.attempt, table.step, getattr(table, blob)).where(
        tuple_(table.run_id, table.attempt, table.step).in_([tuple(key) for key in keys]),
        table.comparison == comparison,
        table.statistics_version == STATISTICS_VERSION,
    )
    return {events.StepKey(*row[:3]): row[3] for row in session.execute(query) if row[3] is not None}


POOLED_STEPS = 10
"""The newest measured steps that k3 is pooled over: one step has too few prompts."""

_COLUMNS = ("k3_kl", "tokens")


def pooled_mismatch(session: Session, run_ids: Collection[str]) -> dict[str, pooling.PooledMean]:
    """Return k3 of trainer/rollout pooled over each run's newest steps; two queries for any number of runs."""
    windows = newest_steps(session, run_ids, comparisons.TRAINER_ROLLOUT, _COLUMNS, POOLED_STEPS)
    keys = [step.key for window in windows.values() for step in window]
    known = blobs_of_steps(session, keys, comparisons.TRAINER_ROLLOUT, "summaries")
    found = {}
    for run_id, window in windows.items():
        if all(step.key in known for step in window):
            summaries = [rollout_summaries.RolloutSummaries.from_bytes(known[step.key]) for step in window]
            found[run_id] = pooling.pool_summaries(summaries, ("k3_kl",))["k3_kl"]
        else:
            # Without all summaries, pooled over steps instead of prompts.
            values = ([json_values.number_or_nan(step.values[name]) for step in window] for name in _COLUMNS)
            found[run_id] = pooling.pool_over_steps(*map(np.array, values))
    return found
