"""Alerts on the delivery of rollouts, which no detector of the history can raise: split ranks, missing shards, losses,
silence.

Each has one open alert in an attempt, at the first step concerned. It stays open until a person resolves it, or until
the shards have arrived.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.changes.announcing import wake_after_commit
from service.platform.database.tables import Alert
from service.platform.identifiers import new_identifier
from service.runs.attempts.active_attempts import active_attempt_of
from service.runs.attempts.service import attempts_of_run
from service.runs.events import ItemsLost, RanksSplit, RunBecameStale, StepClosed
from service.runs.steps.service import find_step, shards_in_words
from service.watch.alerts import repository
from service.watch.alerts.delivery_rules import CLIENT_LOSSES, INCOMPLETE_STEP, SPLIT_RANKS, STALE_RUN

_MOST_STEPS = 100
"""Steps that an alert names in its evidence."""


def alert_of_split(session: Session, split: RanksSplit) -> None:
    """Open the alert of ranks that log into two attempts. The run is locked."""
    newest, older = max(split.attempt, split.other_attempt), min(split.attempt, split.other_attempt)
    held = {split.attempt: split.shards, split.other_attempt: split.other_shards}
    _open(
        session,
        (split.run_id, newest, split.step, SPLIT_RANKS),
        severity="critical",
        value=float(len(held[newest])),
        threshold=float(split.expected_shards),
        why=f"Attempts {older} and {newest} began within a minute and hold different shards of step {split.step}: "
        f"{_numbers(held[older])} and {_numbers(held[newest])} of {split.expected_shards}. They are ranks of one "
        f"launch that log into attempts of their own; only those of attempt {newest} count.",
        what_to_do="Give all ranks of a launch the same attempt_key (argument of Client, or FORESHOCK_ATTEMPT_KEY) and "
        "the same resume_step, and start again.",
        evidence={"attempts": [older, newest], "shards": {str(key): list(shards) for key, shards in held.items()}},
    )


def alert_of_incomplete_step(session: Session, closed: StepClosed) -> None:
    """Open or extend the alert of steps that closed without some shards; retract it when they are complete."""
    step = find_step(session, closed.key)
    if step is None:
        return
    incomplete = step.received_shards < step.expected_shards
    if not incomplete and step.expected_shards == 1:
        return
    if active_attempt_of(attempts_of_run(session, closed.run_id), closed.step) != closed.attempt:
        return
    alert = repository.standing_of_rule(session, closed.run_id, closed.attempt, INCOMPLETE_STEP)
    missing: dict[str, list[int]] = dict(alert.evidence["steps"]) if alert is not None else {}
    if incomplete:
        missing[str(step.step)] = [step.received_shards, step.expected_shards]
    elif missing.pop(str(step.step), None) is None:
        return
    if not missing:
        if alert is not None:
            _change(session, alert, {"state": "retracted"})
        return
    newest = max(missing, key=int)
    text = f"step {newest} has {shards_in_words(*missing[newest])}"
    if len(missing) > 1:
        text += f", and {len(missing) - 1} earlier steps lack shards too"
    _open(
        session,
        (closed.run_id, closed.attempt, closed.step, INCOMPLETE_STEP),
        severity="warning",
        value=float(missing[newest][0]),
        threshold=float(missing[newest][1]),
        why=f"Closed without all shards: {text}. Measures of these steps are of the rollouts that arrived.",
        what_to_do="Look whether a rank died, or logs fewer steps than the others; a late shard is still added.",
        evidence={"steps": dict(sorted(missing.items(), key=lambda item: int(item[0]))[-_MOST_STEPS:])},
    )


def alert_of_losses(session: Session, lost: ItemsLost) -> None:
    """Open or update the alert of items that clients do not deliver."""
    reason = f" The newest reason: {lost.reason}." if lost.reason else ""
    _open(
        session,
        (lost.run_id, lost.attempt, lost.step, CLIENT_LOSSES),
        severity="warning",
        value=float(lost.lost),
        threshold=0.0,
        why=f"{lost.lost:,} logged items were rejected, dropped or invalid, and are not in this run.{reason}",
        what_to_do="Read the trainer's log: the client logs each kind of problem once, and prints a summary when it "
        "closes. Rejected items are in the spool's folder `rejected`.",
        evidence={"lost": lost.lost},
    )


def alert_of_silence(session: Session, stale: RunBecameStale) -> None:
    """Open the alert of a run that ended without saying so: what its clients had not delivered is missing."""
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
        "spool sends what is in it. The alert is retracted when the next step closes.",
        evidence={"last_step": stale.last_step},
    )


def retract_silence(session: Session, closed: StepClosed) -> None:
    """Retract the alert of a silent run whose clients log again."""
    alert = repository.standing_of_rule(session, closed.run_id, closed.attempt, STALE_RUN)
    if alert is not None:
        _change(session, alert, {"state": "retracted"})


def _open(session: Session, key: tuple[str, int, int, str], **values: Any) -> None:
    """Open the alert of a rule, or update the one that stands."""
    run_id, attempt, step, rule = key
    alert = repository.standing_of_rule(session, run_id, attempt, rule)
    if alert is not None:
        changed = {name: value for name, value in values.items() if getattr(alert, name) != value}
        if changed:
            _change(session, alert, changed)
        return
    again = repository.at_step(session, run_id, attempt, rule, step)
    if again is not None:
        # Resolved by a person, or retracted: a rule has one alert at a step.
        _change(session, again, {**values, "state": "open"})
        return
    now = now_us()
    session.add(
        Alert(
            id=new_identifier("alert"),
            run_id=run_id,
            attempt=attempt,
            rule=rule,
            step=step,
            moves_learning_rate=False,
            state="open",
            cleared_step=None,
            changed_by="detector",
            version=repository.version(session, run_id) + 1,
            opened_at_us=now,
            changed_at_us=now,
            **values,
        )
    )
    session.flush()
    wake_after_commit(session, run_id)


def _change(session: Session, alert: Alert, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(alert, name, value)
    alert.version = repository.version(session, alert.run_id) + 1
    alert.changed_by = "detector"
    alert.changed_at_us = now_us()
    session.flush()
    wake_after_commit(session, alert.run_id)


def _numbers(shards: tuple[int, ...]) -> str:
    return ", ".join(map(str, shards)) or "none"
