"""Schemas of alerts."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from foreshock.severity import Severity

AlertState = Literal["open", "acknowledged", "resolved", "retracted"]


class AlertRead(BaseModel):
    """A rule that fired: the measured value, the reason, what to do.

    `resolved`: the value is back, or a person resolved it, or a resume superseded its step. `retracted`: with late
    data the rule does not fire.
    """

    model_config = ConfigDict(from_attributes=True)

    id: str
    attempt: int
    rule: str
    step: int
    severity: Severity
    value: float
    threshold: float
    why: str
    what_to_do: str
    moves_learning_rate: bool
    evidence: dict[str, Any]
    state: AlertState
    cleared_step: int | None = Field(description="the step at which the rule cleared; null while it fires")
    changed_by: Literal["detector", "operator", "rewind"]
    opened_at_us: int
    changed_at_us: int


class AlertOfRun(AlertRead):
    """An alert in a list over runs, with its run."""

    run: str
    run_key: str
    project: str


class AlertFilter(NamedTuple):
    """Which alerts of all runs; empty: no restriction. A run's project must equal all of `projects`."""

    projects: tuple[str, ...] = ()
    states: tuple[AlertState, ...] = ()
    severities: tuple[Severity, ...] = ()
    rules: tuple[str, ...] = ()
