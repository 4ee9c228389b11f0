"""HTTP: theory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.runs.measurements.endpoints import Comparison
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.shard_counts import with_shards
from foreshock_service.runs.theory import service
from foreshock_service.runs.theory.schemas import TheoryRead

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["theory"])


@router.get("/theory")
def read_theory(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    delta_max: Annotated[
        float | None, Query(ge=0.0, le=1.0, description="the largest exact total variation over the states visited")
    ] = None,
    gradient_bound: Annotated[
        float | None, Query(ge=0.0, allow_inf_nan=False, description="B: an upper bound of ‖∇log π‖ of one token")
    ] = None,
    attempt: ActiveOrAttempt = None,
) -> TheoryRead:
    """Return bounds on the bias of this step's gradient, and the cost of its noise at η and at η/2.

    The noise requires the step's scalars `grad_norm_micro_batch` (the root mean square of the norms of micro-batches of
    `micro_batch_prompts` prompts), `grad_norm_batch` (that of all `batch_prompts`), both before clipping. η is the
    scalar `learning_rate` or `lr`, else the newest rate that the trainer acknowledged up to this step,
    else the run's initial learning rate.
    """
    query = service.TheoryQuery(run, step, attempt, comparison, delta_max, gradient_bound)
    with context.database.read() as session:
        found = TheoryRead.of(service.find_theory(session, principal, query))
        return with_shards(session, run, step, attempt, found)
