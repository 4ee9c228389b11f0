"""Theory: the values of the papers' bounds at a step, and which of them are vacuous there.

They follow from the step's stored statistics and summaries, and from the gradient scalars that its trainer logged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from fastapi import Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import comparisons, errors
from foreshock.api import records, steps
from foreshock.theory import GradientNorms, Theory, evaluate_theory, gradient_noise
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import AdviceAcknowledgement, Run
from foreshock_service.platform.parameters import api_router
from foreshock_service.runs import corrections, curves, events, run_endpoints
from foreshock_service.runs.scalars import scalars_of_step
from foreshock_service.runs.steps import with_shards

router = api_router(prefix="/v1/runs/{run}/steps/{step}", tags=["theory"])


@router.get("/theory")
def read_theory(
    run: run_endpoints.RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    comparison: curves.Comparison = comparisons.TRAINER_ROLLOUT,
    delta_max: Annotated[
        float | None, Query(ge=0.0, le=1.0, description="the largest exact total variation over the states visited")
    ] = None,
    gradient_bound: Annotated[
        float | None, Query(ge=0.0, allow_inf_nan=False, description="B: an upper bound of ‖∇log π‖ of one token")
    ] = None,
    attempt: parameters.ActiveOrAttempt = None,
) -> steps.TheoryRecord:
    """Return bounds on the bias of this step's gradient, and the cost of its noise at η and at η/2.

    The noise requires the step's scalars `grad_norm_micro_batch` (the root mean square of the norms of micro-batches of
    `micro_batch_prompts` prompts), `grad_norm_batch` (that of all `batch_prompts`), both before clipping. η is the
    scalar `learning_rate` or `lr`, else the newest rate that the trainer acknowledged up to this step,
    else the run's initial learning rate.
    """
    with context.database.read() as session:
        pair = corrections.read_pair(session, principal, run, step, attempt, comparison)
        found = theory_of_pair(session, pair, delta_max, gradient_bound)
        return with_shards(session, run, step, attempt, _record(found))


# Scalars from which the gradient's variance is computed, in the order of GradientNorms; norms before clipping.
GRADIENT_SCALARS = ("grad_norm_micro_batch", "grad_norm_batch", "micro_batch_prompts", "batch_prompts")
LEARNING_RATE_SCALARS = ("learning_rate", "lr")


@dataclass(frozen=True, slots=True)
class FoundTheory:
    """Evaluated theory, the source of η, and the reason if there is no gradient noise."""

    pair: corrections.MeasuredPair
    theory: Theory
    learning_rate: float | None
    learning_rate_source: str | None
    gradient_missing: str | None


def theory_of_pair(
    session: Session,
    pair: corrections.MeasuredPair,
    delta_max: float | None = None,
    gradient_bound: float | None = None,
) -> FoundTheory:
    """Evaluate the theory of a pair; the caller gives the unmeasurable `delta_max` and `gradient_bound`."""
    scalars = scalars_of_step(session, events.StepKey(pair.run_id, pair.attempt, pair.step))
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
    return FoundTheory(pair, theory, rate, source, missing)


def _learning_rate(
    session: Session, pair: corrections.MeasuredPair, scalars: Mapping[str, float]
) -> tuple[float | None, str | None]:
    """Return η of the step and its source: a rate that the trainer reported precedes the run's initial rate."""
    for name in LEARNING_RATE_SCALARS:
        if scalars.get(name, -1.0) >= 0.0:
            return scalars[name], f"the step's scalar {name}"
    applied = _applied_learning_rate(session, pair)
    if applied is not None:
        return applied[1], f"what the trainer applied at step {applied[0]}"
    initial = session.get_one(Run, pair.run_id).initial_learning_rate
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


def _applied_learning_rate(session: Session, pair: corrections.MeasuredPair) -> tuple[int, float | None] | None:
    """Return the newest step up to this one, and its rate, that the attempt's trainer acknowledged; None without."""
    query = select(AdviceAcknowledgement.step, AdviceAcknowledgement.applied_learning_rate).where(
        AdviceAcknowledgement.run_id == pair.run_id,
        AdviceAcknowledgement.attempt == pair.attempt,
        AdviceAcknowledgement.step <= pair.step,
    )
    row = session.execute(query.order_by(AdviceAcknowledgement.step.desc()).limit(1)).first()
    return None if row is None else (row[0], row[1])


def _record(found: FoundTheory) -> steps.TheoryRecord:
    """Return the theory as it is shown."""
    theory, pair = found.theory, found.pair
    too_large = (corrections.TOO_LARGE,) if math.isinf(theory.bias.per_unit) else ()
    return steps.TheoryRecord(
        comparison=pair.comparison,
        step=pair.step,
        attempt=pair.attempt,
        coverage=pair.coverage,
        bias=replace(theory.bias, notes=(*theory.bias.notes, *too_large)),
        horizon=theory.horizon,
        pinsker=steps.PinskerRecord(bound=theory.pinsker, tv_token=theory.tv_token, notes=tuple(theory.pinsker_notes)),
        sequence_chi2=theory.sequence_chi2,
        gradient=theory.gradient,
        gradient_missing=found.gradient_missing,
        learning_rate=records.NAN if found.learning_rate is None else found.learning_rate,
        learning_rate_source=found.learning_rate_source,
        step_noise=theory.step_noise,
        step_noise_with_bias=theory.step_noise_with_bias,
    )
