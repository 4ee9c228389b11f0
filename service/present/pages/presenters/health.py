"""The presenter of a run's health: its verdict and sentences, and the pooled mismatch of lists."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.conclusions.health import HealthVerdict, PooledMeasure, conclude_health
from foreshock.interval_names import RANGE
from service.present.pages.formatting import number
from service.present.pages.presenters.viewing import Viewing
from service.present.pages.view_models import Label, Tone
from service.runs.health.service import health_evidence

TONES: dict[HealthVerdict, Tone] = {
    "unknown": "", "healthy": "good", "healthy so far": "", "warning": "warning", "critical": "critical",
}  # fmt: skip


def health_of_run(viewing: Viewing, run_id: str) -> tuple[Label, Sequence[str]]:
    """Return the verdict on the run's newest steps, and its sentences, the headline first."""
    evidence = health_evidence(viewing.session, viewing.principal, run_id, None)
    if evidence is None:
        return Label("not measured"), ()
    health = conclude_health(evidence)
    return Label(health.verdict, TONES[health.verdict]), health.sentences


def pooled_in_words(pooled: PooledMeasure | None) -> str | None:
    """Return a pooled mean with its interval, named if it is no 95 % interval; None if there is no mean."""
    if pooled is None:
        return None
    if pooled.high != pooled.high:
        return number(pooled.mean)
    name = "" if pooled.reliable else f"{RANGE} "
    return f"{number(pooled.mean)} ({name}{number(pooled.low)} to {number(pooled.high)})"
