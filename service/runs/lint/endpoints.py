"""HTTP: the lint of a step and of a run."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock.api.steps import LintRecord, RunLintRecord
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import ActiveOrAttempt, StepPath
from foreshock_service.platform.security import Reader
from foreshock_service.runs.lint import service
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.runs.steps import with_shards

router = APIRouter(prefix="/v1/runs/{run}", tags=["lint"])


@router.get("/lint")
def read_run_lint(
    run: RunIdentifier, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> RunLintRecord:
    """Return the warnings of the run's closed steps, with the first and the newest step of each."""
    with context.database.read() as session:
        return service.read_run(session, principal, run, attempt)


@router.get("/steps/{step}/lint")
def read_step_lint(
    run: RunIdentifier, step: StepPath, context: Context, principal: Reader, attempt: ActiveOrAttempt = None
) -> LintRecord:
    """Return the lint of this step's log-probs: named warnings with evidence, and the checks that were not made."""
    with context.database.read() as session:
        return with_shards(session, run, step, attempt, service.read_step(session, principal, run, step, attempt))
