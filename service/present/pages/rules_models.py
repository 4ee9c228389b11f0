"""View models of the page of a run's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.view_models import Label, Moment


@dataclass(frozen=True, slots=True)
class RuleForm:
    """The fields that a form changes; a text that is empty is a threshold that the rule does not have."""

    absolute: str
    relative: str
    minimum_duration: str
    severity: str
    effect: str
    enabled: bool
    resets: bool


@dataclass(frozen=True, slots=True)
class RuleCard:
    """A rule as one line, `threshold`, and in full. `changed`: what differs from the default, and since when."""

    name: str
    title: str
    severity: Label
    threshold: str
    state: Label | None
    reads: str
    evidence: str
    changed: Sequence[str]
    why: str
    what_to_do: str
    effect: str
    source: str
    form: RuleForm


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """The rules that fire for one cause."""

    title: str
    rules: Sequence[RuleCard]


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A change of the run's rules."""

    version: int
    first_step: int
    made: Moment | None
    toml: str


@dataclass(frozen=True, slots=True)
class RulesPage:
    run_name: str
    run_address: str
    project: str
    forms_address: str
    model_kind: str
    groups: Sequence[RuleGroup]
    versions: Sequence[VersionRow]
    first_step: int
    toml: str
    severities: Sequence[str]
    effects: Sequence[str]
    detectors: Sequence[str]
