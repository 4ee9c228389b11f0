"""Measurements: stored when a step closes or is scored, read as curves or as the statistics behind them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from foreshock.api.runs import IncompleteStep
from foreshock.clock import now_us
from foreshock.comparisons import STEP_ROW
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.registry import MEASURES
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.platform.columnar import Kind, check_answer, keep_extremes, read_columns
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import MeasurementStatistics
from foreshock_service.platform.database.tables import measurements as wide_table
from foreshock_service.platform.parameters import check_step_range
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_ranges, is_active
from foreshock_service.runs.attempts.service import attempts_of_run, require_attempt, resolve_step
from foreshock_service.runs.coverage import incomplete_step, statistics_steps
from foreshock_service.runs.measurements import repository
from foreshock_service.runs.measurements.curves import KEYS, Curves, MeasuredStep, check_comparison, columns_of
from foreshock_service.runs.measurements.folding import FoldedStatistics
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.step_key import StepKey

MOST_INCOMPLETE = 1000

_UNMEASURED: dict[str, float | None] = dict.fromkeys(measure.column for measure in MEASURES)


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Request for curves; no comparisons or measures: all; `attempt` None: the active steps."""

    comparisons: Sequence[str] = ()
    measures: Sequence[str] = ()
    attempt: int | None = None
    from_step: int = 0
    to_step: int = 2**31 - 1
    max_points: int | None = None


class MeasurementNotFound(ProblemError):
    """Missing measurement: the step lacks the comparison, or has not closed yet."""

    status = 404
    problem_type = "measurement-not-found"


class StatisticsOutOfDate(ProblemError):
    """Outdated statistics: measured by another release, and unreadable by this one."""

    status = 409
    problem_type = "statistics-out-of-date"


def store_measurements(session: Session, step: StepKey, measurements: Sequence[FoldedStatistics]) -> None:
    """Store (or overwrite) measures and statistics of comparisons at one step; NaN is stored as NULL."""
    now = now_us()
    rows, statistics, newest = [], [], []
    for each in measurements:
        key = {**step._asdict(), "comparison": each.comparison}
        measured = {
            column: float(value)
            for column, value in each.measures.items()
            if column in _UNMEASURED and not math.isnan(value)
        }
        rows.append({**key, **_UNMEASURED, **measured, "from_sample": each.from_sample, "computed_at_us": now})
        blobs = {"statistics": each.statistics, "summaries": each.summaries}
        newest.append({**key, "buckets": each.buckets})
        statistics.append({**key, "statistics_version": each.statistics_version, **blobs})
    repository.put(session, rows, statistics)
    repository.note_newest(session, newest)


def has_measurement(session: Session, key: StepKey, comparison: str) -> bool:
    """Return whether the step has statistics of this comparison, of whatever version."""
    return repository.statistics_of(session, key, comparison) is not None


def is_out_of_date(session: Session, key: StepKey) -> bool:
    """Return whether statistics of the step are of another version than this release's."""
    return any(version != STATISTICS_VERSION for version in repository.versions_of_step(session, key))


def is_run_out_of_date(session: Session, run_id: str) -> bool:
    """Return whether the run's oldest or newest step is out of date; steps are measured in order."""
    return any(version != STATISTICS_VERSION for version in repository.versions_of_ends(session, run_id))


def measures_of_active_steps(
    session: Session,
    run_id: str,
    attempts: Sequence[AttemptStart],
    comparisons: Sequence[str],
    columns: Sequence[str],
    steps: tuple[int, int],
) -> dict[int, dict[tuple[str, str], float]]:
    """Return step → (comparison, column) → value, for active steps with `steps[0]` ≤ step ≤ `steps[1]`."""
    values: defaultdict[int, dict[tuple[str, str], float]] = defaultdict(dict)
    for each in active_ranges(attempts, *steps):
        for step, comparison, row in repository.values_in_range(session, run_id, each, comparisons, columns):
            for column, value in zip(columns, row, strict=True):
                if value is not None:
                    values[step][comparison, column] = value
    return values


def newest_steps(
    session: Session, run_ids: Collection[str], comparison: str, columns: Sequence[str], count: int
) -> dict[str, list[MeasuredStep]]:
    """Return up to `count` of each run's newest active steps with the comparison, in step order, in one query."""
    return repository.newest_steps(session, run_ids, comparison, columns, count)


def newest_rows(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], columns: Sequence[str], count: int
) -> list[tuple[Any, ...]]:
    """Return (step, comparison, the columns) of the logged comparisons of the newest `count` active steps, in order.

    Of steps without one of the two comparisons more are returned.
    """
    return repository.newest_rows(session, run_id, attempts, columns, count)


def summaries_of_steps(session: Session, keys: Collection[StepKey], comparison: str) -> dict[StepKey, bytes]:
    """Return the rollout summaries of these steps that this release can read, in one query."""
    return repository.summaries_of(session, keys, comparison)


def statistics_of_steps(session: Session, keys: Collection[StepKey], comparison: str) -> dict[StepKey, bytes]:
    """Return the folded statistics of these steps that this release can read, in one query."""
    return repository.statistics_of_steps(session, keys, comparison)


def incomplete_steps(session: Session, run_id: str) -> list[IncompleteStep]:
    """Return the active steps that closed without some of their shards, newest first, at most MOST_INCOMPLETE."""
    found = repository.incomplete_steps(session, run_id, attempts_of_run(session, run_id), MOST_INCOMPLETE)
    return [each for step in found if (each := incomplete_step(step)) is not None]


def incomplete_counts(session: Session, run_ids: Collection[str]) -> dict[str, int]:
    """Return how many active steps of each run closed without some of their shards, in one query."""
    return repository.incomplete_counts(session, run_ids)


def read_statistics(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> ComparisonStatistics:
    """Return the folded statistics of a comparison at a step.

    Raises UnknownComparison, MeasurementNotFound naming the available ones, StatisticsOutOfDate if another release
    measured it.
    """
    found = stored_statistics(session, principal, run_id, step, attempt, comparison)
    return ComparisonStatistics.from_bytes(found.statistics)


def stored_statistics(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> MeasurementStatistics:
    """Return the row with statistics and summaries of this release's version; raises as `read_statistics`."""
    check_comparison(comparison)
    get_run(session, principal, run_id)
    key = resolve_step(session, run_id, step, attempt)
    found = repository.statistics_of(session, key, comparison)
    if found is None:
        there = ", ".join(repository.comparisons_of(session, key)) or "nothing yet"
        raise MeasurementNotFound(f"step {step} of attempt {key.attempt} has no {comparison}: measured is {there}")
    if found.statistics_version != STATISTICS_VERSION:
        raise StatisticsOutOfDate(
            f"{comparison} of step {step} was measured by another release (statistics of version "
            f"{found.statistics_version}, this release reads {STATISTICS_VERSION}): run `foreshock remeasure`"
        )
    return found


def read_curves(
    session: Session, context: ServiceContext, principal: Principal, run_id: str, query: CurveQuery
) -> Curves:
    """Return the curves of a run.

    Raises UnknownMeasure and UnknownComparison, naming what is not known, and AnswerTooLarge beyond the settings' caps.
    """
    get_run(session, principal, run_id)
    measures = tuple(columns_of(query.measures))
    for comparison in query.comparisons:
        if comparison != STEP_ROW:
            check_comparison(comparison)
    check_step_range(query.from_step, query.to_step)
    steps = (query.from_step, query.to_step)
    attempts = attempts_of_run(session, run_id)
    if query.attempt is not None:
        chosen = wide_table.c.attempt == require_attempt(session, run_id, query.attempt).attempt
    else:
        chosen = is_active(attempts, wide_table.c.attempt, wide_table.c.step, *steps)
    statement = repository.curves_query(run_id, chosen, query.comparisons, measures, steps)
    kinds: dict[str, Kind] = {**KEYS, **dict.fromkeys(measures, "float")}
    settings = context.settings
    most = settings.max_answer_values if query.max_points is None else settings.max_read_values
    table = read_columns(session, statement, kinds, most).sorted_by("comparison", "step", "attempt")
    incomplete, sent = tuple(incomplete_steps(session, run_id)), tuple(statistics_steps(session, run_id, attempts))
    if incomplete or sent:
        shown = set(zip(table.array("step").tolist(), table.array("attempt").tolist(), strict=True))
        incomplete = tuple(step for step in incomplete if (step.step, step.attempt) in shown)
        sent = tuple(step for step in sent if (step.step, step.attempt) in shown)
    if query.max_points is not None:
        table = keep_extremes(table, ("comparison",), measures, query.max_points)
    check_answer(table, settings.max_answer_values)
    return Curves(table, measures, incomplete, sent)
