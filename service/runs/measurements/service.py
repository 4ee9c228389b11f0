"""Measurements: stored when a step closes or is scored, read as curves or as the statistics behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.comparisons import STEP_ROW
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.registry import MEASURES, measure_named
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.tables import Attempt, MeasurementStatistics, measurements
from service.platform.problem import InvalidRequest, ProblemError
from service.platform.security import Principal
from service.runs.attempts.active_attempts import is_active
from service.runs.attempts.service import attempts_of_run, require_attempt, resolve_step
from service.runs.measurements import repository
from service.runs.measurements.curves import Curves
from service.runs.measurements.downsampling import keep_extremes
from service.runs.measurements.folding import FoldedStatistics
from service.runs.runs.service import get_run
from service.runs.step_key import StepKey


class UnknownMeasure(ProblemError):
    """A measure that is not registered."""

    status = 422


class MeasurementNotFound(ProblemError):
    """The step has no such comparison, or has not closed yet."""

    status = 404


class StatisticsOutOfDate(ProblemError):
    """What is stored of the comparison was measured by a release whose statistics this one cannot read."""

    status = 409


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Which curves: no comparisons or measures means all; `attempt` None means the active steps."""

    comparisons: Sequence[str] = ()
    measures: Sequence[str] = ()
    attempt: int | None = None
    from_step: int = 0
    to_step: int = 2**31 - 1
    max_points: int | None = None


def store_measurement(session: Session, step: StepKey, folded: FoldedStatistics, *, from_sample: bool = False) -> None:
    """Store (or overwrite) the measures and statistics of one comparison at one step; NaN is stored as NULL.

    `from_sample`: only some of the step's rollouts took part.
    """
    key = {**step._asdict(), "comparison": folded.comparison}
    values = {measure.column: folded.measures.get(measure.column) for measure in MEASURES}
    row = {name: None if value is None or math.isnan(value) else float(value) for name, value in values.items()}
    repository.put(
        session,
        {**key, **row, "from_sample": from_sample, "computed_at_us": now_us()},
        {
            **key,
            "statistics_version": folded.statistics_version,
            "statistics": folded.statistics,
            "summaries": folded.summaries,
        },
    )


def has_measurement(session: Session, key: StepKey, comparison: str) -> bool:
    """Return whether the step has statistics of this comparison, of whatever version."""
    return repository.statistics_of(session, key, comparison) is not None


def is_out_of_date(session: Session, key: StepKey) -> bool:
    """Return whether statistics of the step are of another version than this release's."""
    return any(version != STATISTICS_VERSION for version in repository.versions_of_step(session, key))


def is_run_out_of_date(session: Session, run_id: str) -> bool:
    """Return whether the run's oldest or newest step is out of date; steps are measured in order."""
    return any(version != STATISTICS_VERSION for version in repository.versions_of_ends(session, run_id))


def read_active_curves(
    session: Session,
    run_id: str,
    attempts: Sequence[Attempt],
    comparisons: Sequence[str],
    measures: Sequence[str],
    steps: tuple[int, int],
) -> Curves:
    """Return measures (by column) of the active steps with `steps[0]` ≤ step ≤ `steps[1]`; no comparisons: all."""
    chosen = is_active(attempts, measurements.c.attempt, measurements.c.step, *steps)
    return repository.curves(session, run_id, chosen, comparisons, measures, steps)


def read_curves(session: Session, principal: Principal, run_id: str, query: CurveQuery) -> Curves:
    """The curves of a run; raises UnknownMeasure naming what is not registered."""
    get_run(session, principal, run_id)
    measures = _columns_of(query.measures)
    if query.from_step > query.to_step:
        raise InvalidRequest(f"query.from_step: {query.from_step} is beyond to_step {query.to_step}")
    steps = (query.from_step, query.to_step)
    if query.attempt is not None:
        chosen = measurements.c.attempt == require_attempt(session, run_id, query.attempt).attempt
        curves = repository.curves(session, run_id, chosen, query.comparisons, measures, steps)
    else:
        attempts = attempts_of_run(session, run_id)
        curves = read_active_curves(session, run_id, attempts, query.comparisons, measures, steps)
    return curves if query.max_points is None else keep_extremes(curves, query.max_points)


def read_statistics(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> ComparisonStatistics:
    """The folded statistics of a comparison at a step.

    Raises MeasurementNotFound naming what there is, StatisticsOutOfDate where another release measured it.
    """
    found = stored_statistics(session, principal, run_id, step, attempt, comparison)
    return ComparisonStatistics.from_bytes(found.statistics)


def stored_statistics(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> MeasurementStatistics:
    """The row that holds both, of this release's version; raises as `read_statistics`."""
    if comparison == STEP_ROW:
        raise InvalidRequest("query.comparison: must be two scores, such as trainer/rollout")
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


def _columns_of(names: Sequence[str]) -> list[str]:
    if not names:
        return [measure.column for measure in MEASURES]
    columns: dict[str, None] = {}
    unknown = []
    for name in names:
        try:
            columns[measure_named(name).column] = None
        except KeyError:
            unknown.append(name)
    if unknown:
        raise UnknownMeasure(f"there is no measure {', '.join(unknown)}: see the names in GET /v1/measures")
    return list(columns)
