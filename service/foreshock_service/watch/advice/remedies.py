"""The remedy of a run: what is known of it after its newest closed step, as `decide_remedy` needs it."""

from dataclasses import replace
from typing import Final

from sqlalchemy.orm import Session

from foreshock import comparisons
from foreshock.api.watch import onset_of
from foreshock.corrections import correction_named
from foreshock.diagnosis.detectors import WarningState
from foreshock.diagnosis.reward import COLLAPSE_RULE
from foreshock.learning_rate import remedy
from foreshock.learning_rate.control_loop import LoopSettings
from foreshock.learning_rate.decisions import AdviceState
from foreshock.learning_rate.levers import Correction, Rollback
from foreshock_service.platform.database import tables
from foreshock_service.runs import attempts, checkpoints, corrections, lint, measurements
from foreshock_service.watch import alerts

_JUDGED_STEPS: Final = 5
"""Newest steps whose log-probs are judged before a correction is advised: a check may miss a fault in a single one."""


def situation_of(
    session: Session,
    run: tables.Run,
    state: AdviceState,
    detectors: WarningState,
    settings: LoopSettings,
) -> remedy.Situation:
    """Return what is known of the run; the effect of a correction, which takes longest, only if it is of interest."""
    asked, advised, proposed = state.correction.asked, state.correction.last, state.rollback.last
    asked_ess = None
    if (
        asked is not None
        and advised is None
        and correction_named(asked.kind).level == "sequence"
        and settings.enabled
        and remedy.is_evaluated(detectors.loop, settings)
    ):
        asked_ess = _effective_sample(session, run.id, detectors.step, asked)
    collapse = _collapse(session, run.id)
    known = remedy.Situation(
        loop=detectors.loop,
        settings=settings,
        collapse=collapse,
        checkpoints=() if collapse is None else _checkpoints(session, run),
        asked=asked,
        asked_ess=asked_ess,
        correction=advised if isinstance(advised, Correction) else None,
        proposed=proposed if isinstance(proposed, Rollback) else None,
        rolled_back=state.rolled_back,
    )
    if advised is None and detectors.step is not None and remedy.decide_remedy(known).why:
        fault = lint.fault_of_log_probs(session, run.id, detectors.step - _JUDGED_STEPS + 1, detectors.step)
        known = replace(known, fault=fault)
    return known


def _effective_sample(session: Session, run_id: str, step: int | None, asked: Correction) -> float | None:
    if step is None:
        return None
    key = attempts.resolve_step(session, run_id, step, None)
    try:
        pair = corrections.read_pair(session, key, comparisons.TRAINER_ROLLOUT)
    except (measurements.MeasurementNotFound, measurements.StatisticsOutOfDate):
        return None
    return remedy.effective_sample(asked, pair.statistics, pair.summaries)


def _collapse(session: Session, run_id: str) -> int | None:
    """Return the onset of the reward's collapse; None if none is open."""
    onsets = [
        min(onset_of(alert.step, alert.evidence), int(alert.evidence.get("k3_onset_step", alert.step)))
        for alert in alerts.standing_alerts(session, run_id, COLLAPSE_RULE)
    ]
    return min(onsets, default=None)


def _checkpoints(session: Session, run: tables.Run) -> list[Rollback]:
    found = checkpoints.active_checkpoints(session, run.id)
    return [
        Rollback(each.step, each.root, each.path, remedy.resume_command(run.trainer, each.path))
        for each in reversed(found)
    ]
