"""Corrections: the effect of truncation, masks and rejection on a step's tokens. Nothing is applied.

They are evaluated on stored statistics and rollout summaries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from foreshock import comparisons, errors
from foreshock.api import records, runs
from foreshock.api.steps import AffectedRecord, CorrectionRecord, CorrectionsRecord, PopulationRecord
from foreshock.corrections import (
    CORRECTIONS,
    Evaluation,
    Evaluator,
    Population,
    Threshold,
    correction_named,
)
from foreshock.measures import comparison_statistics, rollout_summaries
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import api_router
from foreshock_service.runs import curves, events, measurements, run_endpoints, steps

TOO_LARGE = "a value too large for a float64 is null"

router = api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["corrections"])


@router.get("/corrections")
def read_corrections(
    run: run_endpoints.RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    comparison: curves.Comparison = comparisons.TRAINER_ROLLOUT,
    correction: Annotated[list[parameters.Name] | None, Query(max_length=50, description="absent: all")] = None,
    threshold: Annotated[
        list[parameters.Name] | None,
        Query(
            max_length=50,
            description="`2`, or `0.5_5` for two bounds; of one correction; absent: the thresholds in use",
        ),
    ] = None,
    attempt: parameters.ActiveOrAttempt = None,
) -> CorrectionsRecord:
    """Return the effect of each correction on this step: kept tokens, variance, distortion. Nothing is applied."""
    try:
        requested = list(_requested(correction or (), threshold or ()))
    except errors.InvalidArgumentError as error:
        raise problem.InvalidRequest(f"query.{error.argument}: {error.message}") from error
    with context.database.read() as session:
        pair = read_pair(session, principal, run, step, attempt, comparison)
        evaluator = Evaluator(pair.statistics, pair.summaries)
        record = CorrectionsRecord(
            comparison=comparison,
            step=step,
            attempt=pair.attempt,
            tokens=pair.statistics.tokens,
            rollouts=pair.statistics.rollouts,
            coverage=pair.coverage,
            items=tuple(_evaluation_record(evaluator.evaluate(*each)) for each in requested),
        )
        return steps.with_shards(session, run, step, attempt, record)


def _requested(corrections: Sequence[str], thresholds: Sequence[str]) -> Iterator[tuple[str, Threshold | None]]:
    """Yield the names and thresholds to evaluate; a correction without a threshold in use is listed once."""
    if thresholds and len(corrections) != 1:
        raise errors.InvalidArgumentError("belongs to one correction: name it with `correction`", "threshold")
    for name in corrections or CORRECTIONS:
        correction = correction_named(name)
        named = tuple(correction.threshold(text) for text in thresholds)
        for threshold in named or correction.usual or (None,):
            yield name, threshold


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Stored statistics and summaries of one comparison of a step."""

    run_id: str
    attempt: int
    step: int
    comparison: str
    statistics: comparison_statistics.ComparisonStatistics
    summaries: rollout_summaries.RolloutSummaries
    coverage: runs.Coverage


def read_pair(
    session: Session, principal: security.Principal, run_id: str, step: int, attempt: int | None, comparison: str
) -> MeasuredPair:
    """Return statistics and summaries of a comparison at a step; raise MeasurementNotFound, StatisticsOutOfDate."""
    found = measurements.stored_statistics(session, principal, run_id, step, attempt, comparison)
    assert found.summaries is not None, "every comparison of two scores has summaries"
    statistics = comparison_statistics.ComparisonStatistics.from_bytes(found.statistics)
    return MeasuredPair(
        run_id,
        found.attempt,
        step,
        comparison,
        statistics,
        rollout_summaries.RolloutSummaries.from_bytes(found.summaries),
        steps.coverage_of_step(session, events.StepKey(found.run_id, found.attempt, step), statistics.rollouts),
    )


def usual_evaluations(pair: MeasuredPair) -> list[Evaluation]:
    """Evaluate every correction at its first threshold in use; the API has every other one."""
    evaluator = Evaluator(pair.statistics, pair.summaries)
    return [evaluator.evaluate(name, next(iter(each.usual), None)) for name, each in CORRECTIONS.items()]


def _evaluation_record(found: Evaluation) -> CorrectionRecord:
    correction, affected = found.correction, found.affected
    figures = {
        "kept_tokens": found.kept_tokens,
        "kept_sequences": found.kept_sequences,
        "touched_tokens": found.touched_tokens,
        "weight_mean": found.weights.mean,
        "weight_variance": found.weights.variance,
        "ess": found.weights.effective_fraction,
        "distortion": found.distortion,
        "uncorrected_distortion": found.uncorrected_distortion,
        "token_distortion": found.token_distortion,
        "advantage_distortion": found.advantage_distortion,
    }
    too_large = (TOO_LARGE,) if any(map(math.isinf, figures.values())) else ()
    return CorrectionRecord(
        correction=correction.name,
        title=correction.title,
        formula=correction.formula,
        level=correction.level,
        effect=correction.effect,
        source=correction.source,
        threshold=_text(found.asked),
        threshold_used=_text(found.used),
        exact=found.is_exact,
        **figures,
        affected=records.from_attributes(
            AffectedRecord, affected, touched=_population(affected.touched), untouched=_population(affected.untouched)
        ),
        not_estimable=found.not_estimable,
        notes=(*found.notes, *too_large),
    )


def _population(population: Population) -> PopulationRecord:
    return PopulationRecord(
        sequences=population.sequences,
        reward_mean=population.reward,
        advantage_mean=population.advantage,
        length_mean=population.length,
        turns_mean=population.turns,
        lag_mean=population.lag,
    )


def _text(threshold: Threshold) -> str | None:
    return None if threshold == Threshold() else str(threshold)
