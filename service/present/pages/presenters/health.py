"""The presenter of a run's verdict, and of the pooled mismatch of lists."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.health import HealthVerdict, PooledMeasure, conclude_health
from foreshock.diagnosis.run_verdict import RunSignals, RunVerdict, StandingAlert, SteppedValues, conclude_run
from foreshock.interval_names import RANGE
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import Curve
from foreshock_service.present.pages.formatting import number
from foreshock_service.present.pages.presenters.curves import curves_of, first_of, scalar_curves
from foreshock_service.present.pages.presenters.signals import REWARDS
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.view_models import Tone
from foreshock_service.runs.health.service import health_evidence

TONES: dict[HealthVerdict, Tone] = {
    "unknown": "", "healthy": "good", "healthy so far": "", "warning": "warning", "critical": "critical",
}  # fmt: skip


def verdict_of_run(viewing: Viewing, run: Run, alerts: Sequence[StandingAlert]) -> RunVerdict:
    """Return the verdict on a run from its mismatch, reward, lengths and standing alerts."""
    evidence = health_evidence(viewing.session, viewing.principal, run.id, None)
    mismatch = None if evidence is None else conclude_health(evidence)
    return conclude_run(mismatch, _signals(viewing, run.id), alerts, run.model_kind)


def _signals(viewing: Viewing, run_id: str) -> RunSignals:
    measures = ("reward_mean", "response_length_mean", "k3_kl")
    found = curves_of(viewing, run_id, measures, (STEP_ROW, TRAINER_ROLLOUT), max_points=None)
    rollouts, compared = found.get(STEP_ROW, {}), found.get(TRAINER_ROLLOUT, {})
    reward = rollouts.get("reward_mean") or first_of(scalar_curves(viewing, run_id, REWARDS), REWARDS)
    return RunSignals(_stepped(reward), _stepped(rollouts.get("response_length_mean")), _stepped(compared.get("k3_kl")))


def _stepped(curve: Curve | None) -> SteppedValues:
    points = curve.points() if curve else []
    return SteppedValues([step for step, _ in points], [value for _, value in points])


def pooled_in_words(pooled: PooledMeasure | None) -> str | None:
    """Return a pooled mean with its interval, named if it is no 95 % interval; None if there is no mean."""
    if pooled is None:
        return None
    if pooled.high != pooled.high:
        return number(pooled.mean)
    name = "" if pooled.reliable else f"{RANGE} "
    return f"{number(pooled.mean)} ({name}{number(pooled.low)} to {number(pooled.high)})"
