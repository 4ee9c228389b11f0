"""The rules of a run: read them, and change them from a step on.

A change is a file of rules (`foreshock.diagnosis.rule_files`) over the default rules. Versions are kept for ever;
at a step the newest version holds whose first step it is not before. The detectors are derived again with a new
version, so alerts change; the advice is a log of decisions, so the learning rate never rises by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import RulesFromStep, WarningConfiguration
from foreshock.diagnosis.rule import ThresholdRule
from foreshock.diagnosis.rule_files import InvalidRules, parse_rules, to_toml
from foreshock.model_kind import ModelKind
from foreshock_service.platform.audit.service import record
from foreshock_service.platform.database.tables import RulesVersion, Run
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.watch.rules.schemas import RuleRead, RulesRead, RulesVersionRead, RunRulesRead

SPLIT_RANKS = "split_ranks"
INCOMPLETE_STEP = "incomplete_step"
CLIENT_LOSSES = "client_losses"
STALE_RUN = "stale_run"
DELIVERY_RULES = (SPLIT_RANKS, INCOMPLETE_STEP, CLIENT_LOSSES, STALE_RUN)
"""The alert rules on delivery. Deriving detection again does not touch their alerts."""

MOST_VERSIONS = 100
"""Versions of a run's rules: each is a set of rules that a replay reads."""


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """Event: a run has other rules from a step on. Published with the run locked."""

    run_id: str


class RulesInvalid(ProblemError):
    """A file of rules that is not valid."""

    status = 422
    problem_type = "rules-invalid"


def read_default_rules(model_kind: ModelKind | None) -> RulesRead:
    """Return the default rules of a kind of model."""
    rules = default_rules(model_kind)
    return RulesRead(model_kind=model_kind, rules=_rules_read(rules), toml=to_toml(rules))


def read_rules(session: Session, principal: Principal, run_id: str, step: int) -> RunRulesRead:
    """Return the run's rules at a step, and every version."""
    run = get_run(session, principal, run_id)
    versions = versions_of(session, run_id)
    configuration = configuration_with(run.model_kind, rule_files_of(session, run))
    rules = configuration.rules_at(step)
    return RunRulesRead(
        model_kind=run.model_kind,
        rules=_rules_read(rules),
        toml=to_toml(rules, schedule=configuration.schedule_at(step)),
        step=step,
        versions=[RulesVersionRead.model_validate(version) for version in versions],
    )


def set_rules(session: Session, events: EventBus, principal: Principal, run_id: str, toml: str) -> RulesVersion:
    """Add a version of the run's rules and derive its alerts again. Raises RulesInvalid."""
    run = lock_run(session, principal, run_id)
    version = (run.rules_version or 0) + 1
    if version > MOST_VERSIONS:
        raise RulesInvalid(f"a run may have at most {MOST_VERSIONS} versions of its rules")
    try:
        changes = parse_rules(toml)
        taken = sorted(set(DELIVERY_RULES) & changes.tables.keys())
        if taken:
            raise InvalidRules(f"{taken[0]} is about the delivery of rollouts: a file of rules cannot change it")
        # For every kind of model: the kind may become known later.
        for model_kind in (None, "dense", "moe"):
            changes.applied_to(default_rules(model_kind))
    except InvalidRules as error:
        raise RulesInvalid(str(error)) from error
    row = RulesVersion(
        run_id=run_id, version=version, effective_from_step=changes.effective_from_step, toml=toml, made_at_us=now_us()
    )
    session.add(row)
    run.rules_version, run.updated_at_us = version, now_us()
    session.flush()
    record(
        session, principal, "rules.set", run.id,
        project=run.project, run_id=run.id, before={"version": version - 1},
        after={"version": version, "effective_from_step": changes.effective_from_step, "toml": toml},
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


def configuration_with(model_kind: ModelKind | None, files: Iterable[str]) -> WarningConfiguration:
    """Return the configuration of a run's detectors, with the files of all versions of its rules."""
    base = WarningConfiguration.for_model(model_kind)
    changes = [parse_rules(each) for each in files]
    return replace(
        base,
        changed_rules=tuple(
            RulesFromStep(each.effective_from_step, each.applied_to(base.rules), each.schedule) for each in changes
        ),
    )


def _rules_read(rules: Iterable[ThresholdRule]) -> list[RuleRead]:
    return [RuleRead.model_validate(rule) for rule in rules]
