"""View models: the texts that templates show, ready to read.

The presenters make them; no template sees a database row.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class RunRow:
    name: str
    address: str
    project: str
    state: Label
    model: str | None
    trainer: str | None
    engine: str | None
    last_step: int | None
    mismatch: str | None
    advice: str | None
    alerts: Label
    started: Moment | None


@dataclass(frozen=True, slots=True)
class RunsPage:
    runs: Sequence[RunRow]
    next_address: str | None
    live: bool


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
    leased_until: str


@dataclass(frozen=True, slots=True)
class ServicePage:
    version: str
    state: Label
    process: str
    started: Moment | None
    groups: Sequence[ServiceGroup]
    jobs: Sequence[JobRow]


@dataclass(frozen=True, slots=True)
class Action:
    """An operator's decision that a form offers."""

    kind: str
    text: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A number of the first screen: its newest value, what to compare it with, and the path of its curve."""

    title: str
    value: str
    note: str
    tone: Tone = ""
    path: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class AdvicePanel:
    scale: str
    mode: Label
    shadow: bool
    headline: str
    reason: str
    phase: str
    schedule: str
    next_decay_step: str
    observed_step: str
    revision: str
    applied: str | None
    actions: Sequence[Action]


@dataclass(frozen=True, slots=True)
class AlertCard:
    address: str
    rule: str
    severity: str
    tone: Tone
    state: str
    step: int
    step_address: str
    measured: str
    why: str
    what_to_do: str


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
class ProbeRow:
    step: int
    step_address: str
    state: Label
    kind: str
    scorers: Sequence[str]
    worker: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class RunPage:
    id: str
    forms_address: str
    name: str
    project: str
    state: Label
    live: bool
    model: str | None
    model_kind: str
    trainer: str | None
    engine: str | None
    hardware: str | None
    initial_learning_rate: str | None
    attempt: int | None
    last_step: int | None
    last_step_address: str
    started: Moment | None
    incomplete: str | None
    coverage: str | None
    changes: Sequence[str]
    out_of_date: str | None
    verdict: Label
    health: Sequence[str]
    tiles: Sequence[Tile]
    lint: LintPanel
    advice: AdvicePanel | None
    alerts: Sequence[AlertCard]
    figures: Sequence[Plot]
    probes: Sequence[ProbeRow]


@dataclass(frozen=True, slots=True)
class Value:
    """A number in a table, the tone of its range, and its interval if it has one."""

    text: str
    tone: Tone = ""
    interval: str | None = None


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """One measure: a value for each comparison of the page, in the page's order."""

    name: str
    meaning: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class MeasureGroup:
    """Measures that are read together; the first group, which has no title, is always shown."""

    title: str
    rows: Sequence[MeasureRow]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class StepMeasure:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A link of the attribution's chain, or the whole."""

    name: str
    cause: str
    k3: str
    excess: str
    mean_d: str
    largest: str
    share: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    sample_id: str
    position: int
    token_id: int
    d: str
    log_probs: Sequence[str]


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """A replay with other weights: their name, its k3 with interval, or why it was not made."""

    weights: str
    k3: str
    interval: str
    largest: str
    remark: str


@dataclass(frozen=True, slots=True)
class WeightsPanel:
    """The search for the weights that the engine held: the nearest replays first."""

    scorer: str
    rows: Sequence[WeightsRow]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class StepPage:
    run_name: str
    run_address: str
    project: str
    step: int
    attempt: int
    state: Label
    live: bool
    rollouts: str
    tokens: str
    coverage: str
    shards: str
    earlier: int | None
    earlier_address: str | None
    later: int | None
    later_address: str | None
    out_of_date: str | None
    lint: LintPanel
    comparisons: Sequence[str]
    sampled: Sequence[str]
    measures: Sequence[MeasureGroup]
    ranges_note: str
    intervals_note: str
    tails_note: str
    step_measures: Sequence[StepMeasure]
    figures: Sequence[Plot]
    links: Sequence[LinkRow]
    conclusions: Sequence[str]
    links_notes: Sequence[str]
    weights: WeightsPanel | None
    tokens_address: str
    corrections_address: str


@dataclass(frozen=True, slots=True)
class TokensPart:
    """The worst tokens of a step: a part of its page that is fetched after it, because it reads the step's shards."""

    comparison: str
    scorers: Sequence[str]
    rows: Sequence[TokenRow]
    missing: str
    within: str = ""


@dataclass(frozen=True, slots=True)
class CorrectionRow:
    """The effect of a correction at one threshold."""

    title: str
    threshold: str
    formula: str
    level: str
    kept_tokens: str
    kept_sequences: str
    effective: str
    spread: str
    distortion: str
    advantage_distortion: str
    beyond: str
    reward: str
    length: str
    turns: str


@dataclass(frozen=True, slots=True)
class TheoryRow:
    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class CorrectionsPart:
    """Corrections and theory of a step: a part of its page that is fetched after it."""

    comparison: str
    rows: Sequence[CorrectionRow]
    has_advantages: bool
    has_turns: bool
    not_estimable: Sequence[str]
    notes: Sequence[str]
    theory: Sequence[TheoryRow]
    missing: str


@dataclass(frozen=True, slots=True)
class LoginPage:
    next: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProblemPage:
    title: str
    detail: str
