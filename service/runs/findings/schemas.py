"""Schemas of findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from foreshock.interval_names import INTERVAL, RANGE, RANGE_NOTE
from foreshock.severity import Severity

FindingSource = Literal["attribution", "lint"]


class ConfidenceRead(BaseModel):
    """How sure a named cause is: the share of the mismatch that its link has, with its interval."""

    share: float | None = Field(description="E[d_link·d]/E[d²]")
    low: float | None
    high: float | None
    interval: str = Field(description=f"what low to high is: `{INTERVAL}`, or `{RANGE}`. {RANGE_NOTE}")


class FindingRead(BaseModel):
    """What is concluded from a run's stored data: a cause that an attribution names, or a warning of the lint."""

    model_config = ConfigDict(from_attributes=True)

    run: str
    run_key: str
    project: str
    source: FindingSource
    name: str = Field(
        description="of the lint: the name of the check; of an attribution: the link that is the cause, as the "
        "attribution of the step names it, or `wrong-weights` or `trainer-precision`"
    )
    title: str
    severity: Severity = Field(description="of the worst step; `info` for causes, which say where and not how much")
    sentence: str = Field(description="the evidence at the newest step that has it")
    remedy: str | None = Field(description="recommended action; null if none is known")
    steps: int = Field(description="number of active steps that have it; of an attribution: of the newest 200")
    first_step: int
    newest_step: int
    confidence: ConfidenceRead | None = Field(description="at the newest step; null if the source has none")
    changed_at_us: int = Field(description="when a step was last added or removed, or its severity changed")


class FindingFilter(NamedTuple):
    """Which findings; empty: no restriction. A run's project must equal all of `projects`."""

    projects: tuple[str, ...] = ()
    run_id: str | None = None
    sources: tuple[FindingSource, ...] = ()
    severities: tuple[Severity, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FindingOfStep:
    """A finding at one step."""

    name: str
    severity: Severity
    title: str
    sentence: str
    remedy: str | None = None
    confidence: ConfidenceRead | None = None


@dataclass(frozen=True, slots=True)
class FindingOfSteps:
    """A finding over the active steps of a run; `newest` is that of its newest step, with the worst severity."""

    newest: FindingOfStep
    steps: int
    first_step: int
    newest_step: int
