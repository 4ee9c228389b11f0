"""HTTP: corrections."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock_service.platform.context import Context
from foreshock_service.platform.schemas import ActiveOrAttempt, Name, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.runs.corrections import service
from foreshock_service.runs.corrections.schemas import CorrectionsRead
from foreshock_service.runs.measurements.endpoints import Comparison
from foreshock_service.runs.runs.addresses import RunIdentifier
from foreshock_service.runs.shard_counts import with_shards

router = APIRouter(prefix="/v1/runs/{run}/steps/{step}", tags=["corrections"])


@router.get("/corrections")
def read_corrections(
    run: RunIdentifier,
    step: StepPath,
    context: Context,
    principal: Reader,
    comparison: Comparison = TRAINER_ROLLOUT,
    correction: Annotated[list[Name] | None, Query(max_length=50, description="absent: all")] = None,
    threshold: Annotated[
        list[Name] | None,
        Query(
            max_length=50,
            description="`2`, or `0.5_5` for two bounds; of one correction; absent: the thresholds in use",
        ),
    ] = None,
    attempt: ActiveOrAttempt = None,
) -> CorrectionsRead:
    """Return the effect of each correction on this step: kept tokens, variance, distortion. Nothing is applied."""
    query = service.CorrectionQuery(run, step, attempt, comparison, correction or (), threshold or ())
    with context.database.read() as session:
        evaluated = CorrectionsRead.of(service.evaluate_corrections(session, principal, query))
        return with_shards(session, run, step, attempt, evaluated)
