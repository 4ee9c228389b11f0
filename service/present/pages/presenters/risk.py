"""The presenter of a run's risk: a badge with its level, and the reasons."""

from __future__ import annotations

from foreshock.diagnosis.risk import NO_PROBABILITY, Risk, RiskLevel
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Label, RiskStrip, Tone
from foreshock_service.watch.risk.service import risks_of_runs

TONES: dict[RiskLevel, Tone] = {
    "calm": "", "watch": "", "elevated": "warning", "high": "critical", "critical": "critical",
}  # fmt: skip


def risk_strip(viewing: Viewing, run: Run) -> RiskStrip:
    """Return the run's risk with its reasons."""
    risk = risks_of_runs(viewing.session, [run.id])[run.id]
    return RiskStrip(Label(f"risk: {risk.level}", TONES[risk.level]), risk.reasons, NO_PROBABILITY)


def risk_label(risk: Risk) -> Label:
    """Return the badge of a level."""
    return Label(risk.level, TONES[risk.level])
