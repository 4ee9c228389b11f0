"""HTTP: the rules of retention of a run."""

from __future__ import annotations

from fastapi import APIRouter, status

from foreshock.api.runs import RetentionRecord
from foreshock_service.maintenance.retention import RetentionRulesBody, read_rules, set_rules
from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Administrator, Reader
from foreshock_service.runs.runs.addresses import RunIdentifier

router = APIRouter(prefix="/v1/runs/{run}/retention", tags=["retention"])


@router.get("")
def read_retention(run: RunIdentifier, context: Context, principal: Reader) -> RetentionRecord:
    """Return the rules by which tokens of the run are kept: its own, else those of the service's settings."""
    with context.database.read() as session:
        return read_rules(session, context.settings, principal, run)


@router.put("")
def set_retention(
    run: RunIdentifier, body: RetentionRulesBody, context: Context, principal: Administrator
) -> RetentionRecord:
    """Give the run rules of its own; `last_steps` null keeps all its tokens, whatever the settings say."""
    context.database.write(lambda session: set_rules(session, principal, run, body))
    with context.database.read() as session:
        return read_rules(session, context.settings, principal, run)


@router.delete("", status_code=status.HTTP_204_NO_CONTENT)
def remove_retention(run: RunIdentifier, context: Context, principal: Administrator) -> None:
    """Remove the run's own rules: those of the settings hold again."""
    context.database.write(lambda session: set_rules(session, principal, run, None))
