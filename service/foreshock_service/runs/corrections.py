"""Corrections and theory of a step: the effect of a correction on its tokens, and bounds that hold for its mismatch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from fastapi import Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import comparisons, errors, json_values
from foreshock.api import records, runs
from foreshock.api import steps as answers
from foreshock.corrections import CORRECTIONS, Evaluation, Evaluator, Threshold, correction_named
from foreshock.measures import comparison_statistics, rollout_summaries
from foreshock.theory import GradientNorms, evaluate_theory, gradient_noise
from foreshock_service.platform import parameters, problem
from foreshock_service.platform.database.tables import AdviceAcknowledgement, Run
from foreshock_service.runs import attempts, curves, events, measurements, steps
from foreshock_service.runs.scalars import scalars_of_step

TOO_LARGE = "a value too large for a float64 is null"

router = parameters.api_router(prefix="/v1/runs/{run}/steps/{step}")


@router.get("/corrections", tags=["corrections"])
def read_corrections(
    asked: attempts.StepOfRequest,
    comparison: curves.Comparison = comparisons.TRAINER_ROLLOUT,
    correction: Annotated[list[parameters.Name] | None, Query(max_length=50, description="absent: all")] = None,
    threshold: Annotated[
        list[parameters.Name] | None,
        Query(
            max_length=50,
            description="`2`, or `0.5_5` for two bounds; of one correction; absent: the thresholds in use",
        ),
    ] = None,
) -> answers.CorrectionsRecord:
    """Return the effect of each correction on this step: kept tokens, variance, distortion. Nothing is applied."""
    try:
        requested = list(_requested(correction or (), threshold or ()))
    except errors.InvalidArgumentError as error:
        raise problem.InvalidRequest(f"query.{error.argument}: {error.message}") from error
    with asked.reading() as session:
        pair = read_pair(session, asked.key(session), comparison)
        evaluator = Evaluator(pair.statistics, pair.summaries)
        record = answers.CorrectionsRecord(
            comparison=comparison,
            step=pair.key.step,
            attempt=pair.key.attempt,
            tokens=pair.statistics.tokens,
            rollouts=pair.statistics.rollouts,
            coverage=pair.coverage,
            items=tuple(_evaluation_record(evaluator.evaluate(*each)) for each in requested),
        )
        return steps.with_shards(session, pair.key, record)


def _requested(corrections: Sequence[str], thresholds: Sequence[str]) -> Iterator[tuple[str, Threshold]]:
    if thresholds and len(corrections) != 1:
        raise errors.InvalidArgumentError("belongs to one correction: name it with `correction`", "threshold")
    for name in corrections or CORRECTIONS:
        correction = correction_named(name)
        named = tuple(correction.threshold(text) for text in thresholds)
        for threshold in named or correction.usual:
            yield name, threshold


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Stored statistics and summaries of one comparison of a step."""

    key: events.StepKey
    comparison: str
    statistics: comparison_statistics.ComparisonStatistics
    summaries: rollout_summaries.RolloutSummaries
    coverage: runs.Coverage


def read_pair(session: Session, key: events.StepKey, comparison: str) -> MeasuredPair:
    """Return statistics and summaries of a comparison at a step; raise MeasurementNotFound, StatisticsOutOfDate."""
    found = measurements.stored_statistics(session, key, comparison)
    assert found.summaries is not None, "every comparison of two scores has summaries"
    statistics = comparison_statistics.ComparisonStatistics.from_bytes(found.statistics)
    summaries = rollout_summaries.RolloutSummaries.from_bytes(found.summaries)
    coverage = steps.coverage_of_step(session, key, statistics.rollouts)
    return MeasuredPair(key, comparison, statistics, summaries, coverage)


def usual_evaluations(pair: MeasuredPair) -> list[Evaluation]:
    """Evaluate every correction at the first of its thresholds in use; the API evaluates the others too."""
    evaluator = Evaluator(pair.statistics, pair.summaries)
    return [evaluator.evaluate(name) for name in CORRECTIONS]


def _evaluation_record(found: Evaluation) -> answers.CorrectionRecord:
    correction = found.correction
    record = records.from_attributes(
        answers.CorrectionRecord,
        found,
        correction=correction.name,
        **{name: getattr(correction, name) for name in ("title", "formula", "level", "effect", "source")},
        threshold=_text(found.asked),
        threshold_used=_text(found.used),
        exact=found.is_exact,
        weight_mean=found.weights.mean,
        weight_variance=found.weights.variance,
        ess=found.weights.effective_fraction,
    )
    figures = (getattr(record, each.name) for each in fields(record))
    too_large = any(isinstance(each, float) and math.isinf(each) for each in figures)
    return replace(record, notes=(*record.notes, TOO_LARGE)) if too_large else record


def _text(threshold: Threshold) -> str | None:
    return None if threshold == Threshold() else str(threshold)


@router.get("/theory", tags=["theory"])
def read_theory(
    asked: attempts.StepOfRequest,
    comparison: curves.Comparison = comparisons.TRAINER_ROLLOUT,
    delta_max: Annotated[
        float | None, Query(ge=0.0, le=1.0, description="the largest exact total variation over the states visited")
    ] = None,
    gradient_bound: Annotated[
        float | None, Query(ge=0.0, allow_inf_nan=False, description="B: an upper bound of ‖∇log π‖ of one token")
    ] = None,
) -> answers.TheoryRecord:
    """Return bounds on the bias of this step's gradient, and the cost of its noise at η and at η/2.

    The noise requires the step's scalars `grad_norm_micro_batch` (the root mean square of the norms of micro-batches of
    `micro_batch_prompts` prompts), `grad_norm_batch` (that of all `batch_prompts`), both before clipping. η is the
    scalar `learning_rate` or `lr`, else the newest rate that the trainer acknowledged up to this step,
    else the run's initial learning rate.
    """
    with asked.reading() as session:
        pair = read_pair(session, asked.key(session), comparison)
        found = theory_of_pair(session, pair, delta_max, gradient_bound)
        if math.isinf(found.bias.per_unit):
            found = replace(found, bias=replace(found.bias, notes=(*found.bias.notes, TOO_LARGE)))
        return steps.with_shards(session, pair.key, found)


# Scalars from which the gradient's variance is computed, in the order of GradientNorms; norms before clipping.
GRADIENT_SCALARS = ("grad_norm_micro_batch", "grad_norm_batch", "micro_batch_prompts", "batch_prompts")
LEARNING_RATE_SCALARS = ("learning_rate", "lr")


def theory_of_pair(
    session: Session, pair: MeasuredPair, delta_max: float | None = None, gradient_bound: float | None = None
) -> answers.TheoryRecord:
    """Evaluate the theory of a pair; the caller gives the unmeasurable `delta_max` and `gradient_bound`."""
    scalars = scalars_of_step(session, pair.key)
    rate, source = _learning_rate(session, pair, scalars)
    norms, missing = _norms(scalars)
    theory = evaluate_theory(
        pair.statistics,
        pair.summaries,
        delta_max=delta_max,
        norms=norms,
        learning_rate=rate,
        gradient_bound=gradient_bound,
    )
    return records.from_attributes(
        answers.TheoryRecord,
        theory,
        comparison=pair.comparison,
        step=pair.key.step,
        attempt=pair.key.attempt,
        coverage=pair.coverage,
        incomplete=None,
        gradient_missing=missing,
        learning_rate=json_values.number_or_nan(rate),
        learning_rate_source=source,
    )


def _learning_rate(
    session: Session, pair: MeasuredPair, scalars: Mapping[str, float]
) -> tuple[float | None, str | None]:
    """Return η of the step and its source: a rate that the trainer reported precedes the run's initial rate."""
    for name in LEARNING_RATE_SCALARS:
        if scalars.get(name, -1.0) >= 0.0:
            return scalars[name], f"the step's scalar {name}"
    table = AdviceAcknowledgement
    query = select(table.step, table.applied_learning_rate).filter_by(run_id=pair.key.run_id, attempt=pair.key.attempt)
    query = query.where(table.step <= pair.key.step).order_by(table.step.desc()).limit(1)
    if (applied := session.execute(query).first()) is not None:
        return applied[1], f"what the trainer applied at step {applied[0]}"
    initial = session.get_one(Run, pair.key.run_id).initial_learning_rate
    return initial, None if initial is None else "the run's initial learning rate, because the step has none of its own"


def _norms(scalars: Mapping[str, float]) -> tuple[GradientNorms | None, str | None]:
    """Return the gradient norms, or the reason why they are unusable: invalid scalars do not fail the request."""
    absent = [name for name in GRADIENT_SCALARS if name not in scalars]
    if absent:
        return None, f"this step logs no scalar {', '.join(absent)}"
    norms = GradientNorms(*(scalars[name] for name in GRADIENT_SCALARS))
    try:
        gradient_noise(norms)
    except errors.InvalidArgumentError as error:
        named = dict(zip((field.name for field in fields(GradientNorms)), GRADIENT_SCALARS, strict=True))
        return None, f"the scalar {named[error.argument]} is invalid: {error.message}"
    return norms, None
