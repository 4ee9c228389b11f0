"""Schemas of findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foreshock.api.runs import ConfidenceRecord, FindingSource
from foreshock.severity import Severity


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
    confidence: ConfidenceRecord | None = None


@dataclass(frozen=True, slots=True)
class FindingOfSteps:
    """A finding over the active steps of a run; `newest` is that of its newest step, with the worst severity."""

    newest: FindingOfStep
    steps: int
    first_step: int
    newest_step: int
