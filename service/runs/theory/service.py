"""Theory of a step: its stored statistics and summaries, and the scalars that its trainer logged of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sqlalchemy.orm import Session

from foreshock.errors import InvalidArgumentError
from foreshock.theory import GradientNorms, Theory, evaluate_theory, gradient_noise
from service.platform.database.tables import Run
from service.platform.security import Principal
from service.runs.corrections.service import MeasuredPair, read_pair
from service.runs.runs.service import get_run
from service.runs.scalars.service import scalars_of_step
from service.runs.step_key import StepKey
from service.runs.theory import repository

# The scalars that the gradient's variance is made of, in the order of GradientNorms; norms are before clipping.
GRADIENT_SCALARS = ("grad_norm_micro_batch", "grad_norm_batch", "micro_batch_prompts", "batch_prompts")
LEARNING_RATE_SCALARS = ("learning_rate", "lr")


@dataclass(frozen=True, slots=True)
class TheoryQuestion:
    """Of which comparison; `delta_max` and `gradient_bound` are what only the caller can know."""

    run_id: str
    step: int
    attempt: int | None
    comparison: str
    delta_max: float | None = None
    gradient_bound: float | None = None


@dataclass(frozen=True, slots=True)
class FoundTheory:
    """The theory, what it is of, where η came from, and why there is no gradient noise where there is none."""

    pair: MeasuredPair
    theory: Theory
    delta_max: float | None
    gradient_bound: float | None
    learning_rate: float | None
    learning_rate_source: str | None
    gradient_missing: str | None


def find_theory(session: Session, principal: Principal, question: TheoryQuestion) -> FoundTheory:
    """What theory says of the step; raises MeasurementNotFound, StatisticsOutOfDate."""
    pair = read_pair(session, principal, question.run_id, question.step, question.attempt, question.comparison)
    return theory_of_pair(session, principal, question, pair)


def theory_of_pair(session: Session, principal: Principal, question: TheoryQuestion, pair: MeasuredPair) -> FoundTheory:
    """The same, of what was read already."""
    run = get_run(session, principal, question.run_id)
    scalars = scalars_of_step(session, StepKey(question.run_id, pair.attempt, question.step))
    rate, source = _learning_rate(session, run, pair, scalars)
    norms, missing = _norms(scalars)
    theory = evaluate_theory(
        pair.statistics,
        pair.summaries,
        delta_max=question.delta_max,
        norms=norms,
        learning_rate=rate,
        gradient_bound=question.gradient_bound,
    )
    return FoundTheory(pair, theory, question.delta_max, question.gradient_bound, rate, source, missing)


def _learning_rate(
    session: Session, run: Run, pair: MeasuredPair, scalars: Mapping[str, float]
) -> tuple[float | None, str | None]:
    """η of the step and where it is from: what the trainer says it used goes before what the run began with."""
    for name in LEARNING_RATE_SCALARS:
        if scalars.get(name, -1.0) >= 0.0:
            return scalars[name], f"the step's scalar {name}"
    applied = repository.applied_learning_rate(session, run.id, pair.attempt, pair.step)
    if applied is not None:
        return applied.learning_rate, f"what the trainer applied at step {applied.step}"
    initial = run.initial_learning_rate
    return initial, None if initial is None else "the run's initial learning rate, for want of the step's own"


def _norms(scalars: Mapping[str, float]) -> tuple[GradientNorms | None, str | None]:
    """The norms of gradients, or why they cannot be used: what a trainer logged wrongly is no fault of the request."""
    absent = [name for name in GRADIENT_SCALARS if name not in scalars]
    if absent:
        return None, f"this step logs no scalar {', '.join(absent)}"
    norms = GradientNorms(*(scalars[name] for name in GRADIENT_SCALARS))
    try:
        gradient_noise(norms)
    except InvalidArgumentError as error:
        named = dict(zip((field.name for field in fields(GradientNorms)), GRADIENT_SCALARS, strict=True))
        return None, f"the scalar {named[error.argument]} makes no sense: {error.message}"
    return norms, None
