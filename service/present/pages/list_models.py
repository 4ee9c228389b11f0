"""View models of the pages over several runs: the list, alerts, hardware, comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.view_models import Label, Moment, Plot, Tone


@dataclass(frozen=True, slots=True)
class RunRow:
    id: str
    name: str
    address: str
    project: str
    state: Label
    model: str | None
    trainer: str | None
    engine: str | None
    last_step: int | None
    mismatch: str | None
    interval: str
    reward: str | None
    reward_path: str
    fall: Label | None
    incomplete: Label | None
    advice: str | None
    risk: Label
    alerts: Label
    started: Moment | None


@dataclass(frozen=True, slots=True)
class RunsFilter:
    """What the list of runs is restricted to, and the states and levels of risk that can be chosen."""

    search: str
    project: str
    model: str
    state: str
    risk: str
    states: Sequence[str]
    risks: Sequence[str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class AlertOfRunRow:
    """An alert in the list over all runs."""

    run: str
    run_address: str
    severity: Label
    rule: str
    step: int
    step_address: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class AlertsPage:
    """The alerts of all runs that the visitor may see, the last changed first."""

    rows: Sequence[AlertOfRunRow]
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
class HardwareRow:
    """A kind of accelerator with its workers and jobs."""

    accelerator: str
    devices: str
    workers: int
    queued: int
    running: int
    scores: int


@dataclass(frozen=True, slots=True)
class HardwarePage:
    configurations: Sequence[ConfigurationRow]
    accelerators: Sequence[HardwareRow]
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
class RunsPage:
    runs: Sequence[RunRow]
    filter: RunsFilter
    filtered: bool
    next_address: str | None
    live: bool
