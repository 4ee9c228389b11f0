"""One rule of a run at a time: how it differs from the default and since when, and a change of it.

A change is written as a new version of the run's file of rules: the newest one with that rule changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy.orm import Session

from foreshock.diagnosis.rule import ThresholdRule
from foreshock.diagnosis.rule_files import RuleChanges, changes_to_toml, parse_rules
from foreshock_service.platform.database.tables import RulesVersion, Run
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.schemas import LARGEST_STEP
from foreshock_service.platform.security import Principal
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.watch.rules.service import RulesInvalid, configuration_with, set_rules, versions_of


class RuleNotFound(ProblemError):
    """The run has no such rule."""

    status = 404
    problem_type = "rule-not-found"


@dataclass(frozen=True, slots=True)
class RuleOfRun:
    """A rule at the last step. `since`: the step from which it is so; None: it always was as the default is."""

    rule: ThresholdRule
    default: ThresholdRule | None
    enabled: bool
    since: int | None

    def changes(self) -> Iterator[tuple[str, object, object]]:
        """Yield (field, value, default value) of each field that differs from the default rule."""
        if self.default is not None and self.enabled:
            for field in fields(ThresholdRule):
                value, before = getattr(self.rule, field.name), getattr(self.default, field.name)
                if value != before:
                    yield field.name, value, before


@dataclass(frozen=True, slots=True)
class RulesOfRun:
    """Every rule of a run, the disabled ones included, in the order of the default rules; and all versions."""

    run: Run
    rules: tuple[RuleOfRun, ...]
    versions: tuple[RulesVersion, ...]

    @property
    def toml(self) -> str:
        """The newest file of changes; one without rules if there is none."""
        return self.versions[-1].toml if self.versions else changes_to_toml(RuleChanges(0, {}))


def rules_of_run(session: Session, principal: Principal, run_id: str) -> RulesOfRun:
    """Return the run's rules with their changes. Raises RunNotFound or RunDeleted."""
    run = get_run(session, principal, run_id)
    versions = tuple(versions_of(session, run_id))
    configuration = configuration_with(run.model_kind, [version.toml for version in versions])
    # The rules change at these steps only.
    bounds = sorted({0, *(version.effective_from_step for version in versions)})
    at_bounds = [{rule.name: rule for rule in configuration.rules_at(bound)} for bound in bounds]
    now, defaults = at_bounds[-1], {rule.name: rule for rule in configuration.rules}
    found = []
    for name in (*defaults, *(name for name in now if name not in defaults)):
        same = len(bounds) - 1
        while same > 0 and at_bounds[same - 1].get(name) == now.get(name):
            same -= 1
        since = None if same == 0 and now.get(name) == defaults.get(name) else bounds[same]
        found.append(RuleOfRun(now.get(name) or defaults[name], defaults.get(name), name in now, since))
    return RulesOfRun(run, tuple(found), versions)


def change_rule(
    session: Session,
    events: EventBus,
    principal: Principal,
    run_id: str,
    name: str,
    values: Mapping[str, Any] | None,
    first_step: int,
) -> RulesVersion:
    """Change fields of one rule from a step on; None disables it, no field brings its default back.

    Values that are the default's are not kept. Raises RuleNotFound and RulesInvalid.
    """
    if not 0 <= first_step <= LARGEST_STEP:
        raise RulesInvalid(f"first_step must be from 0 to {LARGEST_STEP}, got {first_step}")
    lock_run(session, principal, run_id)
    found = rules_of_run(session, principal, run_id)
    rule = next((each for each in found.rules if each.rule.name == name), None)
    if rule is None:
        raise RuleNotFound(f"the run has no rule {name!r}")
    newest = parse_rules(found.toml)
    tables = dict(newest.tables)
    kept = _changed_table(rule.default, tables.pop(name, None), values)
    if kept is None or kept:
        tables[name] = kept
    changes = replace(newest, effective_from_step=first_step, tables=tables)
    return set_rules(session, events, principal, run_id, changes_to_toml(changes))


def _changed_table(
    default: ThresholdRule | None, before: Mapping[str, Any] | None, values: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the table of a changed rule: None disables it; an empty one leaves it out of the file."""
    if not values:
        # A rule of the run's own has no default: without a table there is no such rule.
        return None if values is None and default is not None else {}
    changed = {**(before or {}), **values}
    if default is None:
        return changed
    return {field: value for field, value in changed.items() if value != getattr(default, field)}
