"""View models of the page of one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock_service.present.pages.step_models import StepMeasure


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
