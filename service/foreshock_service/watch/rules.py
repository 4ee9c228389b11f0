"""The rules in force: the default ones with the changes of the file `FORESHOCK_RULES`, which is read at the start.

The file holds for all runs. Another file is another configuration of the detectors, so that detection derives every
running run again after the start, as after an upgrade. The advice is a log of decisions: it keeps those it has made.
"""

from pathlib import Path
from typing import Annotated

from fastapi import Query
from sqlalchemy.orm import Session

from foreshock.api import records, watch
from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock.diagnosis.rule_files import NO_CHANGES, RuleChanges, read_rules
from foreshock.model_kind import ModelKind
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.settings import Settings

SESSION_KEY = "foreshock.rules"
"""Key of `session.info` under which sessions have the changes of the service's file of rules."""

router = parameters.api_router(prefix="/v1", tags=["rules"])


def rules_of_settings(settings: Settings) -> RuleChanges:
    """Return what the file of the settings changes. Raises InvalidRules with file, line and what is allowed."""
    return read_rules(Path(settings.rules)) if settings.rules else NO_CHANGES


def rules_in_force(session: Session) -> RuleChanges:
    """Return the changes of the service's file of rules."""
    changes: RuleChanges = session.info.get(SESSION_KEY, NO_CHANGES)
    return changes


@router.get("/rules")
def read_rules_in_force(
    context: Context, principal: security.Reader, model_kind: Annotated[ModelKind | None, Query()] = None
) -> watch.RulesRecord:
    """Return the rules that watch runs of a kind of model, each with the source of its threshold."""
    with context.database.read() as session:
        rules = WarningConfiguration.for_model(model_kind, rules_in_force(session)).rules
    return watch.RulesRecord(
        model_kind=model_kind, rules=tuple(records.from_attributes(watch.RuleRecord, rule) for rule in rules)
    )
