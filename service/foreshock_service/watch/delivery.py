"""Alerts on the delivery of rollouts: missing shards, losses, silence. The detectors cannot see these.

Each rule has at most one open alert in an attempt. It stays open until a person resolves it or its cause has ended.
Alerts of missing shards are at the first affected step and depend only on the stored shards, so they are the same in
any order of arrival.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api.watch import STANDING
from foreshock.clock import now_us
from foreshock.diagnosis import wording
from foreshock.diagnosis.rule import CLIENT_LOSSES, INCOMPLETE_STEP, JUDGING_FAILED, STALE_RUN
from foreshock_service.platform.database.tables import Alert, Step
from foreshock_service.runs import due, events, runs, steps
from foreshock_service.runs.attempts import attempts_of_run, is_active
from foreshock_service.watch import alerts

_MOST_STEPS = 100
"""Most steps that an alert names in its evidence."""
_MOST_SHARDS = 64
"""Most missing shards that an alert names in its evidence."""


def alert_of_incomplete_step(session: Session, closed: events.StepClosed) -> None:
    """Update the alert of steps that closed without some shards; retract it when the steps are complete."""
    step = steps.find_step(session, closed.key)
    if step is None or step.expected_shards == 1 or not is_active(session, closed):
        return
    alert = alerts.standing_of_rule(session, closed.run_id, closed.attempt, INCOMPLETE_STEP)
    first = closed.step if alert is None else min(alert.step, closed.step)
    if step.received_shards < step.expected_shards or (alert is not None and first == alert.step):
        _alert_of_missing(session, events.StepKey(closed.run_id, closed.attempt, first), alert)


def forget_superseded(session: Session, started: events.AttemptStarted) -> None:
    """Remove steps that the new attempt superseded from the alerts of missing shards. The run is locked."""
    for attempt in attempts_of_run(session, started.run_id):
        alert = alerts.standing_of_rule(session, started.run_id, attempt.attempt, INCOMPLETE_STEP)
        if alert is not None:
            _alert_of_missing(session, events.StepKey(alert.run_id, alert.attempt, alert.step), alert)


def _alert_of_missing(session: Session, first: events.StepKey, alert: Alert | None) -> None:
    """Open, change or retract the alert of the steps from `first` on that closed without some shards."""
    # Write this transaction's pending changes before they are queried.
    session.flush()
    missing = steps.missing_shards(session, first, _MOST_STEPS)
    if not missing:
        if alert is not None:
            _change(session, alert, {"state": "retracted"})
        return
    newest = missing[0]
    absent = steps.missing_shards_of(session, newest, newest.expected_shards)
    silent = steps.silent_ranks(session, missing)
    if silent:
        ranks = wording.ranks_in_words(silent)
        text = f"{ranks[0].upper()}{ranks[1:]} sent nothing in {_steps_in_words(session, missing)}"
    else:
        text = steps.shards_in_words(newest.received_shards, newest.expected_shards, absent)
        text = f"Closed without all shards: step {newest.step} has {text}"
        if len(missing) > 1:
            text += f", and {len(missing) - 1} earlier steps lack shards too"
    _open(
        session,
        # With that many steps, the first missing one may not be read: the alert stays at `first`.
        (*first[:2], missing[-1].step if len(missing) < _MOST_STEPS else first.step, INCOMPLETE_STEP),
        severity="warning",
        value=float(newest.received_shards),
        threshold=float(newest.expected_shards),
        why=f"{text}. Measures of these steps are of the rollouts that arrived.",
        what_to_do="Look whether a rank died, or logs fewer steps than the others; a late shard is still added. "
        "Ranks of one launch that log into attempts of their own need the same attempt_key (argument of Client, or "
        "FORESHOCK_ATTEMPT_KEY) and resume_step.",
        evidence={
            "steps": {str(each.step): [each.received_shards, each.expected_shards] for each in missing[::-1]},
            "missing_at_newest_step": list(absent[:_MOST_SHARDS]),
        },
    )


def _steps_in_words(session: Session, missing: Sequence[Step]) -> str:
    """Return in words the steps of one attempt that lack shards, given newest first."""
    if len(missing) == 1:
        return f"step {missing[0].step}"
    if len(missing) == steps.count_closed(session, missing[0].run_id, missing[0].attempt):
        return f"all {len(missing)} steps"
    return f"{len(missing)} steps, {missing[-1].step} to {missing[0].step}"


def alert_of_losses(session: Session, lost: events.ItemsLost) -> None:
    """Open or update the alert of items that clients could not deliver."""
    reason = f" The newest reason: {lost.reason}." if lost.reason else ""
    _open(
        session,
        (lost.run_id, lost.attempt, lost.step, CLIENT_LOSSES),
        severity="warning",
        value=float(lost.lost),
        threshold=0.0,
        why=f"{lost.lost:,} of the logged items and rollouts did not arrive: rejected, dropped or invalid.{reason}",
        what_to_do="Read the trainer's log: the client logs each kind of problem once, and prints a summary when it "
        "closes. Rejected items are kept in the spool as files `.rejected`.",
        evidence={"lost": lost.lost},
    )


def alert_of_failure(session: Session, failed: events.RunFailed) -> None:
    """Open the alert of a run that the service could not handle, unless it stands; a person resolves it."""
    attempts, run = attempts_of_run(session, failed.run_id), runs.find_run(session, failed.run_id)
    if not attempts or run is None:
        return
    if alerts.standing_of_rule(session, failed.run_id, attempts[-1].attempt, JUDGING_FAILED) is not None:
        # A loop that fails in each round, or several that fail by turns, change nothing.
        return
    _open(
        session,
        (failed.run_id, attempts[-1].attempt, run.last_step or 0, JUDGING_FAILED),
        severity="warning",
        value=0.0,
        threshold=0.0,
        why=f"The service could not {failed.work}: {type(failed.error).__name__}: {str(failed.error)[:200]}. Uploads "
        "are stored, and other runs are handled.",
        what_to_do="Report this error, with the log of the service. It is tried again; resolve this alert once it "
        "succeeds.",
        evidence={},
    )


def alert_of_silence(session: Session, stale: events.RunBecameStale) -> None:
    """Open the alert of a run that fell silent without reporting its end: undelivered items are missing."""
    attempts = attempts_of_run(session, stale.run_id)
    if not attempts:
        return
    _open(
        session,
        (stale.run_id, attempts[-1].attempt, stale.last_step or 0, STALE_RUN),
        severity="warning",
        value=stale.seconds,
        threshold=stale.seconds,
        why=f"No client of the run gave a sign of life for {stale.seconds:,.0f} s, and the run was not finished. "
        "What was logged and not delivered is missing: it is in the spool of the trainer's machine, or lost.",
        what_to_do="Look whether the trainer was killed or cannot reach the service. The next client with the same "
        "spool sends what is in it. The next sign of life of the trainer resolves this alert.",
        evidence={"last_step": stale.last_step},
    )


def end_silence(session: Session, heard: events.TrainerHeard) -> None:
    """Resolve the alerts of a silent run whose trainer lives."""
    standing = select(Alert).filter_by(run_id=heard.run_id, rule=STALE_RUN).where(Alert.state.in_(STANDING))
    for alert in session.scalars(standing).all():
        _change(session, alert, {"state": "resolved"})


def _open(session: Session, key: tuple[str, int, int, str], **values: Any) -> None:
    """Open the alert of a rule at a step, or update the rule's standing alert and move it there."""
    run_id, attempt, step, rule = key
    alert = alerts.standing_of_rule(session, run_id, attempt, rule)
    again = alerts.at_step(session, run_id, attempt, rule, step)
    if alert is not None and again is not None and again.id != alert.id:
        # A rule has one alert at a step: the one at this step is opened again instead.
        _change(session, alert, {"state": "retracted"})
    elif alert is not None:
        wanted = {"step": step if rule == INCOMPLETE_STEP else alert.step, **values}
        changed = {name: value for name, value in wanted.items() if getattr(alert, name) != value}
        if changed:
            _change(session, alert, changed)
        return
    if again is not None:
        # A rule has one alert at a step: the resolved or retracted one is opened again.
        _change(session, again, {**values, "state": "open", "opened_at_us": now_us()})
        return
    opened = {"attempt": attempt, "rule": rule, "step": step, "state": "open", "cleared_step": None, **values}
    alerts.add(session, run_id, moves_learning_rate=False, **opened)
    due.mark(session, run_id)


def _change(session: Session, alert: Alert, values: dict[str, Any]) -> None:
    alerts.change(session, alert, "detector", quiet=False, **values)
    due.mark(session, alert.run_id)
