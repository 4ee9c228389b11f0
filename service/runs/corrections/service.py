"""Corrections, evaluated from the statistics and rollout summaries that a closed step has stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from foreshock.corrections import CORRECTIONS, Evaluation, Evaluator, Threshold, correction_named
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock_service.platform.problem import InvalidRequest
from foreshock_service.platform.security import Principal
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.coverage.service import coverage_of_step
from foreshock_service.runs.measurements.service import stored_statistics
from foreshock_service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class CorrectionQuery:
    """Request for corrections and thresholds; none named: all corrections, at the thresholds in use."""

    run_id: str
    step: int
    attempt: int | None
    comparison: str
    corrections: Sequence[str] = ()
    thresholds: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Stored statistics and summaries of one comparison of a step."""

    comparison: str
    step: int
    attempt: int
    statistics: ComparisonStatistics
    summaries: RolloutSummaries
    coverage: CoverageRead


@dataclass(frozen=True, slots=True)
class EvaluatedCorrections:
    """Evaluations of corrections, and the pair that they were computed from."""

    pair: MeasuredPair
    evaluations: tuple[Evaluation, ...]


def read_pair(
    session: Session, principal: Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> MeasuredPair:
    """Return statistics and summaries of a comparison at a step; raise MeasurementNotFound, StatisticsOutOfDate."""
    found = stored_statistics(session, principal, run_id, step, attempt, comparison)
    assert found.summaries is not None, "every comparison of two scores has summaries"
    statistics = ComparisonStatistics.from_bytes(found.statistics)
    return MeasuredPair(
        comparison,
        step,
        found.attempt,
        statistics,
        RolloutSummaries.from_bytes(found.summaries),
        coverage_of_step(session, StepKey(found.run_id, found.attempt, step), statistics.rollouts),
    )


def evaluate_corrections(session: Session, principal: Principal, query: CorrectionQuery) -> EvaluatedCorrections:
    """Evaluate the corrections; raise InvalidRequest naming the invalid value, and the errors of `read_pair`."""
    try:
        requested = list(_requested(query))
    except InvalidArgumentError as error:
        raise InvalidRequest(f"query.{error.argument}: {error.message}") from error
    pair = read_pair(session, principal, query.run_id, query.step, query.attempt, query.comparison)
    evaluator = Evaluator(pair.statistics, pair.summaries)
    return EvaluatedCorrections(pair, tuple(evaluator.evaluate(name, threshold) for name, threshold in requested))


def _requested(query: CorrectionQuery) -> Iterator[tuple[str, Threshold | None]]:
    """Return the names and thresholds to evaluate; a correction without a threshold in use is listed once."""
    if query.thresholds and len(query.corrections) != 1:
        raise InvalidArgumentError("belongs to one correction: name it with `correction`", "threshold")
    for name in query.corrections or CORRECTIONS:
        correction = correction_named(name)
        named = tuple(correction.threshold(text) for text in query.thresholds)
        for threshold in named or correction.usual or (None,):
            yield name, threshold
