"""What happened in a run, in its order: alerts by episode, announced changes, resumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foreshock.api.diagnosis import DiagnosisEvent
from foreshock.api.runs import ChangeRecord
from foreshock.diagnosis.changes import change_in_words
from foreshock.diagnosis.episodes import episodes_of, is_of_mismatch, onset_of
from foreshock.diagnosis.headline import found_later, name_of
from foreshock.diagnosis.history import History, PastAlert
from foreshock.diagnosis.mismatch_rules import STEP_RULE
from foreshock.diagnosis.wording import number

MOST_FOLDED: Final = 4
"""Largest number of folded alerts that an event names."""

_MOST_EVENTS = 50


def events_of(alerts: Sequence[PastAlert], history: History) -> tuple[DiagnosisEvent, ...]:
    """Return the newest alerts as events, oldest first; of an episode only the first one tells.

    An open alert on a single step says nothing beside a graver one on the mismatch, and a past one beside the list of
    all steps that recur.
    """
    odd = history.odd if any(each.rule == STEP_RULE for each in alerts) else None
    recur = odd is not None and odd.recur
    is_graver = any(each.is_open and each.severity != "info" and is_of_mismatch(each) for each in alerts)
    alerts = [each for each in alerts if not (is_graver and each.is_open and each.rule == STEP_RULE)]
    heads = {id(episode[0]): episode for episode in episodes_of(each for each in alerts if each.is_open)}
    return tuple(_event(each, heads.get(id(each), ()), recur=recur) for each in alerts[-_MOST_EVENTS:])


def _of_change(change: ChangeRecord) -> DiagnosisEvent:
    said = f"Step {change.step}: {change_in_words(change)}."
    return DiagnosisEvent(
        step=change.step, onset=change.step, rule="change", severity="info", sentence=said, is_open=False, is_told=True
    )  # fmt: skip


def _of_resume(step: int) -> DiagnosisEvent:
    said = f"Step {step}: the run was resumed."
    return DiagnosisEvent(
        step=step, onset=step, rule="resume", severity="info", sentence=said, is_open=False, is_told=True
    )  # fmt: skip


def _in_order(events: Sequence[DiagnosisEvent]) -> tuple[DiagnosisEvent, ...]:
    return tuple(sorted(events, key=lambda each: each.onset))


def _event(alert: PastAlert, episode: Sequence[PastAlert], *, recur: bool) -> DiagnosisEvent:
    """Return the event of an alert; `episode` has the alerts of its episode if this alert stands for it."""
    onset = onset_of(alert, episode)
    where = f"Step {onset}{found_later(alert, episode)}"
    sentence = f"{where}: {name_of(alert)}. {alert.why}"
    if len(episode) > 1:
        named = [name_of(each) for each in episode[1 : MOST_FOLDED + 1]]
        more = len(episode) - 1 - len(named)
        sentence += f" With it: {', '.join(named)}{f' and {more} more' if more else ''}."
    is_single = alert.rule == STEP_RULE and not alert.is_open and alert.cleared is not None
    if is_single and alert.cleared is not None:
        where = (
            f"Step {alert.onset}" if alert.cleared == alert.onset + 1 else f"Steps {alert.onset} to {alert.cleared - 1}"
        )
        at = "" if where.startswith("Step ") else f" at step {alert.onset}"
        sentence = f"{where}: k3 was {number(alert.value)}{at}; it was back at step {alert.cleared}."
    return DiagnosisEvent(
        step=alert.step,
        onset=onset,
        rule=alert.rule,
        severity=alert.severity,
        sentence=sentence,
        is_open=alert.is_open,
        is_told=bool(episode) or (is_single and not recur),
    )
