"""HTTP: rules."""

from typing import Annotated

from fastapi import Query

from foreshock.api.records import from_attributes
from foreshock.api.watch import RulesRecord, RulesVersionRecord, RunRulesRecord
from foreshock.model_kind import ModelKind
from foreshock_service.platform.context import Context
from foreshock_service.platform.parameters import LARGEST_STEP, api_router
from foreshock_service.platform.security import Administrator, Reader
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.watch.rules import service
from foreshock_service.watch.rules.service import RulesPut

router = api_router(prefix="/v1", tags=["rules"])


@router.get("/rules")
def read_default_rules(principal: Reader, model_kind: Annotated[ModelKind | None, Query()] = None) -> RulesRecord:
    """Return the default rules of a kind of model, each with the source of its threshold, also as TOML."""
    return service.read_default_rules(model_kind)


@router.get("/runs/{run}/rules")
def read_rules(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    step: Annotated[int, Query(ge=0, le=LARGEST_STEP, description="absent: the last one")] = LARGEST_STEP,
) -> RunRulesRecord:
    """Return the rules that hold at a step, and every version of the run's changes."""
    with context.database.read() as session:
        return service.read_rules(session, principal, run, step)


@router.put("/runs/{run}/rules")
def set_rules(run: RunIdentifier, body: RulesPut, context: Context, principal: Administrator) -> RulesVersionRecord:
    """Change the run's rules from the file's step on; its alerts are derived again, its learning rate does not rise.

    A version replaces the ones before it from its first step on; one without rules brings the defaults back.
    """
    return context.database.write(
        lambda session: from_attributes(
            RulesVersionRecord, service.set_rules(session, context.events, principal, run, body.toml)
        )
    )
