"""What the templates of steps, rollouts and lists show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.api.probes import AcceleratorRecord
from foreshock.api.runs import StepRecord
from foreshock.api.watch import AlertOfRun
from foreshock_service.present.pages.view_models import Label, LintPanel, Plot, Tone


@dataclass(frozen=True, slots=True)
class AlertsPage:
    """The alerts of all runs that the visitor may see, the last changed first."""

    rows: Sequence[AlertOfRun]
    state: str
    severity: str
    states: Sequence[str]
    severities: Sequence[str]
    next_address: str | None


@dataclass(frozen=True, slots=True)
class ConfigurationRow:
    """The runs of one configuration on one kind of hardware, with their pooled k3."""

    hardware: str
    configuration: str
    runs: int
    k3: str
    tone: Tone
    worst: str
    worst_address: str


@dataclass(frozen=True, slots=True)
class HardwarePage:
    configurations: Sequence[ConfigurationRow]
    accelerators: Sequence[AcceleratorRecord]
    accelerators_left_out: int


@dataclass(frozen=True, slots=True)
class ComparedRun:
    name: str
    address: str
    colour: int


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A setting, or a field of the fingerprint, with its value in each compared run."""

    name: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class ComparePage:
    """Several runs side by side: curves by step, and what differs between them."""

    runs: Sequence[ComparedRun]
    figures: Sequence[Plot]
    different: Sequence[DifferenceRow]
    equal: Sequence[DifferenceRow]


@dataclass(frozen=True, slots=True)
class ScoredBy:
    """A scorer's log-prob and probability of one token."""

    scorer: str
    log_prob: str
    probability: str


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """One rollout: what a reader without a script sees, and the address of the columns that the viewer draws."""

    run_name: str
    run_address: str
    step_address: str
    project: str
    step: int
    sample_id: str
    facts: Sequence[StepMeasure]
    headline: str
    scored: Sequence[ScoredBy]
    tokens_address: str
    note: str


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
    address: str
    position: int
    token_id: int
    text: str | None
    d: str
    log_probs: Sequence[str]


@dataclass(frozen=True, slots=True)
class WorstRolloutRow:
    """A rollout of a step, with its mismatch; the rollouts with the largest |d| come first."""

    sample_id: str
    address: str
    largest: str
    k3: str
    length: str
    reward: str


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A finding of the doctor: what, how much it explains, what to do, and what would confirm it."""

    kind: str
    sentence: str
    evidence: str
    fix: str
    confirm: str


@dataclass(frozen=True, slots=True)
class DoctorPanel:
    """The doctor's newest report on `step`, and the state of one that is not done.

    `action`: where a form asks for an examination; None: nobody may, or one runs. `is_possible`: the step has weights.
    """

    step: int
    findings: Sequence[DoctorFinding]
    notes: Sequence[str]
    state: str
    action: str | None
    is_possible: bool


@dataclass(frozen=True, slots=True)
class StepPage:
    run_name: str
    run_address: str
    project: str
    step: StepRecord
    state: Label
    live: bool
    earlier: int | None
    later: int | None
    judged: Sequence[MeasureRow]
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
    doctor: DoctorPanel
    tokens_address: str
    rollouts_address: str
    corrections_address: str
    grafana_address: str | None


@dataclass(frozen=True, slots=True)
class TokensPart:
    """The worst tokens of a step: a part of its page that is fetched after it, because it reads the step's shards."""

    comparison: str
    scorers: Sequence[str]
    rows: Sequence[TokenRow]
    missing: str
    within: str = ""
    rollouts: Sequence[WorstRolloutRow] = ()


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
