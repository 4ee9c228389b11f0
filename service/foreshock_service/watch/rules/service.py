"""The rules of a run: read them, and change them from a step on, as a file or one rule at a time.

A change is a file of rules (`foreshock.diagnosis.rule_files`) over the default rules. Versions are kept for ever. At a
step, the newest version whose first step is not later applies. A new version derives the detectors again, so alerts
change. The advice is a log of decisions, so a new version never raises the learning rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api import records, watch
from foreshock.clock import now_us
from foreshock.diagnosis import detectors, rule_files
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.rule import ThresholdRule
from foreshock.model_kind import ModelKind
from foreshock_service.platform import audit, parameters, problem, security
from foreshock_service.platform.context import Context, EventBus
from foreshock_service.platform.database.tables import RulesVersion, Run
from foreshock_service.runs import run_endpoints, runs

router = parameters.api_router(prefix="/v1", tags=["rules"])


class RulesPut(BaseModel):
    """A file of rules."""

    model_config = ConfigDict(extra="forbid")

    toml: str = Field(
        max_length=rule_files.LARGEST_TEXT, description="changes of the default rules; see docs/early-warning.md"
    )


SPLIT_RANKS = "split_ranks"
INCOMPLETE_STEP = "incomplete_step"
CLIENT_LOSSES = "client_losses"
STALE_RUN = "stale_run"
DELIVERY_RULES = (SPLIT_RANKS, INCOMPLETE_STEP, CLIENT_LOSSES, STALE_RUN)
"""The alert rules on delivery. Deriving detection again does not change their alerts."""

MOST_VERSIONS = 100
"""Most versions of a run's rules: a derivation reads all of them."""


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """Event: the rules of a run change from a step on. Published with the run locked."""

    run_id: str


class RulesInvalid(problem.ProblemError, status=422, problem_type="rules-invalid"):
    """A file of rules that is not valid."""


@router.get("/rules")
def read_default_rules(
    principal: security.Reader, model_kind: Annotated[ModelKind | None, Query()] = None
) -> watch.RulesRecord:
    """Return the default rules of a kind of model, each with the source of its threshold, also as TOML."""
    rules = default_rules(model_kind)
    return watch.RulesRecord(model_kind=model_kind, rules=_rules_read(rules), toml=rule_files.to_toml(rules))


@router.get("/runs/{run}/rules")
def read_rules(
    run: run_endpoints.RunIdentifier,
    context: Context,
    principal: security.Reader,
    step: Annotated[int, Query(ge=0, le=parameters.LARGEST_STEP, description="absent: the last one")] = (
        parameters.LARGEST_STEP
    ),
) -> watch.RunRulesRecord:
    """Return the rules that hold at a step, and every version of the run's changes."""
    with context.database.read() as session:
        found = runs.get_run(session, principal, run)
        versions = versions_of(session, run)
        configuration = configuration_with(found.model_kind, rule_files_of(session, found))
    rules = configuration.rules_at(step)
    return watch.RunRulesRecord(
        model_kind=found.model_kind,
        rules=_rules_read(rules),
        toml=rule_files.to_toml(rules, schedule=configuration.schedule_at(step), loop=configuration.loop_at(step)),
        step=step,
        versions=tuple(records.from_attributes(watch.RulesVersionRecord, version) for version in versions),
    )


@router.put("/runs/{run}/rules")
def set_rules(
    run: run_endpoints.RunIdentifier, body: RulesPut, context: Context, principal: security.Administrator
) -> watch.RulesVersionRecord:
    """Change the run's rules from the file's step on; its alerts are derived again, its learning rate does not rise.

    A version replaces the ones before it from its first step on; one without rules brings the defaults back.
    """
    return context.database.write(
        lambda session: records.from_attributes(
            watch.RulesVersionRecord, store_rules(session, context.events, principal, run, body.toml)
        )
    )


def store_rules(
    session: Session,
    events: EventBus,
    principal: security.Principal,
    run_id: str,
    toml: str,
    reason: str | None = None,
) -> RulesVersion:
    """Add a version of the run's rules and derive its alerts again; the audit keeps `reason`. Raises RulesInvalid."""
    run = runs.lock_run(session, principal, run_id)
    version = (run.rules_version or 0) + 1
    if version > MOST_VERSIONS:
        raise RulesInvalid(f"a run may have at most {MOST_VERSIONS} versions of its rules")
    try:
        changes = rule_files.parse_rules(toml)
        taken = sorted(set(DELIVERY_RULES) & changes.tables.keys())
        if taken:
            raise rule_files.InvalidRules(
                f"{taken[0]} is about the delivery of rollouts: a file of rules cannot change it"
            )
        # Checked for every kind of model, because the kind may become known later.
        for model_kind in (None, "dense", "moe"):
            changes.applied_to(default_rules(model_kind))
    except rule_files.InvalidRules as error:
        raise RulesInvalid(str(error)) from error
    row = RulesVersion(
        run_id=run_id, version=version, effective_from_step=changes.effective_from_step, toml=toml, made_at_us=now_us()
    )
    session.add(row)
    run.rules_version, run.updated_at_us = version, now_us()
    session.flush()
    audit.record(
        session, principal, "rules.set", run.id,
        project=run.project, run_id=run.id, before={"version": version - 1},
        after={"version": version, "effective_from_step": changes.effective_from_step, "toml": toml}
        | ({} if reason is None else {"reason": reason}),
    )  # fmt: skip
    events.publish(session, RulesChanged(run_id))
    return row


def versions_of(session: Session, run_id: str) -> Sequence[RulesVersion]:
    """Return the versions of a run's rules, oldest first."""
    query = select(RulesVersion).where(RulesVersion.run_id == run_id).order_by(RulesVersion.version)
    return session.scalars(query).all()


def rule_files_of(session: Session, run: Run) -> tuple[str, ...]:
    """Return the files of the run's versions, oldest first."""
    if run.rules_version is None:
        return ()
    return tuple(version.toml for version in versions_of(session, run.id))


def configuration_with(model_kind: ModelKind | None, files: Iterable[str]) -> detectors.WarningConfiguration:
    """Return the configuration of a run's detectors, with the files of all versions of its rules."""
    base = detectors.WarningConfiguration.for_model(model_kind)
    changes = [rule_files.parse_rules(each) for each in files]
    return replace(
        base,
        changed_rules=tuple(
            detectors.RulesFromStep(each.effective_from_step, each.applied_to(base.rules), each.schedule, each.loop)
            for each in changes
        ),
    )


def _rules_read(rules: Iterable[ThresholdRule]) -> tuple[watch.RuleRecord, ...]:
    return tuple(records.from_attributes(watch.RuleRecord, rule) for rule in rules)


class RuleNotFound(problem.ProblemError, status=404, problem_type="rule-not-found"):
    """The run has no such rule."""


@dataclass(frozen=True, slots=True)
class RuleOfRun:
    """A rule at the last step. `since`: the step from which it is as it is; None: it was always the default."""

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
        """The newest file of changes; a file without rules if there is none."""
        return self.versions[-1].toml if self.versions else rule_files.changes_to_toml(rule_files.RuleChanges(0, {}))


def rules_of_run(session: Session, principal: security.Principal, run_id: str) -> RulesOfRun:
    """Return the run's rules with their changes. Raises RunNotFound or RunDeleted."""
    run = runs.get_run(session, principal, run_id)
    versions = tuple(versions_of(session, run_id))
    configuration = configuration_with(run.model_kind, [version.toml for version in versions])
    # The rules change only at these steps.
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
    principal: security.Principal,
    run_id: str,
    name: str,
    values: Mapping[str, Any] | None,
    first_step: int,
    reason: str | None = None,
) -> RulesVersion:
    """Change fields of one rule from a step on; None disables it, an empty mapping restores its default.

    Values equal to the default's are not stored. Raises RuleNotFound and RulesInvalid.
    """
    if not 0 <= first_step <= parameters.LARGEST_STEP:
        raise RulesInvalid(f"first_step must be from 0 to {parameters.LARGEST_STEP}, got {first_step}")
    runs.lock_run(session, principal, run_id)
    found = rules_of_run(session, principal, run_id)
    rule = next((each for each in found.rules if each.rule.name == name), None)
    if rule is None:
        raise RuleNotFound(f"the run has no rule {name!r}")
    newest = rule_files.parse_rules(found.toml)
    tables = dict(newest.tables)
    kept = _changed_table(rule.default, tables.pop(name, None), values)
    if kept is None or kept:
        tables[name] = kept
    changes = replace(newest, effective_from_step=first_step, tables=tables)
    return store_rules(session, events, principal, run_id, rule_files.changes_to_toml(changes), reason)


def _changed_table(
    default: ThresholdRule | None, before: Mapping[str, Any] | None, values: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the table of a changed rule: None disables the rule; an empty table is left out of the file."""
    if not values:
        # The run's own rule has no default: without a table it does not exist.
        return None if values is None and default is not None else {}
    changed = {**(before or {}), **values}
    if default is None:
        return changed
    return {field: value for field, value in changed.items() if value != getattr(default, field)}
