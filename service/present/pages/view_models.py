"""What the templates of runs and rules show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Label:
    """A badge: a word and its tone. The word must be enough without the colour."""

    text: str
    tone: Tone = ""
    live: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A time for a machine (ISO 8601) and for a person."""

    machine: str
    person: str


@dataclass(frozen=True, slots=True)
class Visitor:
    """The scopes of the person who reads the page; they decide which forms the page has."""

    signed_in: bool
    may_answer_alerts: bool
    may_operate: bool
    csrf_token: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several figures for the same place."""

    text: str
    address: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A place for a figure. The browser fetches its specification from `address`, or from that of another choice."""

    id: str
    title: str
    address: str
    wide: bool = False
    choices: Sequence[Choice] = ()
    over_steps: bool = False


@dataclass(frozen=True, slots=True)
class ServiceFigure:
    """A number of the service: what it means, and where it comes from. `tone` only if something is to be done."""

    name: str
    value: str
    meaning: str
    source: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class ServiceGroup:
    """Figures of one part of the service."""

    id: str
    title: str
    figures: Sequence[ServiceFigure]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A background job, and the process that does it."""

    name: str
    state: Label
    holder: str
    runs: str
    started: Moment | None
    finished: Moment | None


@dataclass(frozen=True, slots=True)
class ServicePage:
    version: str
    state: Label
    process: str
    started: Moment | None
    groups: Sequence[ServiceGroup]
    jobs: Sequence[JobRow]


@dataclass(frozen=True, slots=True)
class LintCard:
    """A warning of the semantics lint. `steps`: how many steps of a run have it; the newest of them is linked."""

    name: str
    severity: str
    title: str
    seen: str
    where: Sequence[str]
    effect: str
    remedy: str
    steps: str | None = None
    newest: int | None = None
    newest_address: str | None = None


@dataclass(frozen=True, slots=True)
class LintPanel:
    """The result of the semantics lint; empty if every check was made and is clean."""

    cards: Sequence[LintCard]
    not_checked: Sequence[str]
    checks: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class LoginPage:
    next: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProblemPage:
    title: str
    detail: str


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
