"""Theory of a step, from its stored statistics and summaries and the gradient scalars that its trainer logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sqlalchemy.orm import Session

from foreshock.errors import InvalidArgumentError
from foreshock.theory import GradientNorms, Theory, evaluate_theory, gradient_noise
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.security import Principal
from foreshock_service.runs.corrections.service import MeasuredPair, read_pair
from foreshock_service.runs.runs.service import get_run
from foreshock_service.runs.scalars.service import scalars_of_step
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.theory import repository

# Scalars from which the gradient's variance is computed, in the order of GradientNorms; norms before clipping.
GRADIENT_SCALARS = ("grad_norm_micro_batch", "grad_norm_batch", "micro_batch_prompts", "batch_prompts")
LEARNING_RATE_SCALARS = ("learning_rate", "lr")


@dataclass(frozen=True, slots=True)
class TheoryQuery:
    """Request for the theory of a comparison; the caller gives the unmeasurable `delta_max` and `gradient_bound`."""

    run_id: str
    step: int
    attempt: int | None
    comparison: str
    delta_max: float | None = None
    gradient_bound: float | None = None


@dataclass(frozen=True, slots=True)
class FoundTheory:
    """Evaluated theory, the source of η, and the reason if there is no gradient noise."""

    pair: MeasuredPair
    theory: Theory
    delta_max: float | None
    gradient_bound: float | None
    learning_rate: float | None
    learning_rate_source: str | None
    gradient_missing: str | None


def find_theory(session: Session, principal: Principal, query: TheoryQuery) -> FoundTheory:
    """Evaluate the theory of the step; raise MeasurementNotFound, StatisticsOutOfDate."""
    pair = read_pair(session, principal, query.run_id, query.step, query.attempt, query.comparison)
    return theory_of_pair(session, principal, query, pair)


def theory_of_pair(session: Session, principal: Principal, query: TheoryQuery, pair: MeasuredPair) -> FoundTheory:
    """Evaluate the theory of a pair that was read already."""
    run = get_run(session, principal, query.run_id)
    scalars = scalars_of_step(session, StepKey(query.run_id, pair.attempt, query.step))
    rate, source = _learning_rate(session, run, pair, scalars)
    norms, missing = _norms(scalars)
    theory = evaluate_theory(
        pair.statistics,
        pair.summaries,
        delta_max=query.delta_max,
        norms=norms,
        learning_rate=rate,
        gradient_bound=query.gradient_bound,
    )
    return FoundTheory(pair, theory, query.delta_max, query.gradient_bound, rate, source, missing)


def _learning_rate(
    session: Session, run: Run, pair: MeasuredPair, scalars: Mapping[str, float]
) -> tuple[float | None, str | None]:
    """Return η of the step and its source: a rate that the trainer reported precedes the run's initial rate."""
    for name in LEARNING_RATE_SCALARS:
        if scalars.get(name, -1.0) >= 0.0:
            return scalars[name], f"the step's scalar {name}"
    applied = repository.applied_learning_rate(session, run.id, pair.attempt, pair.step)
    if applied is not None:
        return applied.learning_rate, f"what the trainer applied at step {applied.step}"
    initial = run.initial_learning_rate
    return initial, None if initial is None else "the run's initial learning rate, because the step has none of its own"


def _norms(scalars: Mapping[str, float]) -> tuple[GradientNorms | None, str | None]:
    """Return the gradient norms, or the reason why they are unusable: invalid scalars do not fail the request."""
    absent = [name for name in GRADIENT_SCALARS if name not in scalars]
    if absent:
        return None, f"this step logs no scalar {', '.join(absent)}"
    norms = GradientNorms(*(scalars[name] for name in GRADIENT_SCALARS))
    try:
        gradient_noise(norms)
    except InvalidArgumentError as error:
        named = dict(zip((field.name for field in fields(GradientNorms)), GRADIENT_SCALARS, strict=True))
        return None, f"the scalar {named[error.argument]} is invalid: {error.message}"
    return norms, None
