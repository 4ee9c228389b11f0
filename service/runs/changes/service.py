"""Changes within a run: announced by its trainer, or read from the setups that its shards name.

Changes of the setup are derived when they are asked for: whatever order the shards arrived in, the answer is
the same. A run that names one setup only, which is the common case, costs one query."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, cast

from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy.orm import Session

from foreshock.api.runs import ChangeRecord, DifferenceRecord
from foreshock.changes import CHANGE_KINDS, ChangeKind
from foreshock.clock import now_us
from foreshock.digests import canonical_json
from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.tables import AnnouncedChange as StoredChange
from foreshock_service.platform.database.tables import Step
from foreshock_service.platform.parameters import NO_NUL, Page, decode_cursor, page_of
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_attempt_of, active_ranges
from foreshock_service.runs.attempts.service import attempts_of_run, check_attempt, fingerprints_of_attempts
from foreshock_service.runs.changes import repository
from foreshock_service.runs.changes.repository import Chosen
from foreshock_service.runs.changes.setups import Setup, StoredSetup, differences
from foreshock_service.runs.events import ChangeAnnounced
from foreshock_service.runs.runs.service import get_run, lock_run
from foreshock_service.runs.step_key import StepKey

Text = Annotated[str, StringConstraints(max_length=1000, pattern=NO_NUL)]


class ChangePut(BaseModel):
    """A change that the trainer announces; the baselines of the detectors begin anew at its step."""

    note: Text | None = Field(default=None, description="what changed, in words")
    before: Text | float | None = Field(default=None, description="such as the old length cap")
    after: Text | float | None = None


MOST_SETUPS = 100
"""Setups of a run that are told apart: a run whose shards name more is taken to name none from there on."""

LONGEST_SETUP = 100_000
"""Characters of a setup as JSON; a longer one is not stored."""

_NOTHING_KNOWN = "{}"
_START = (-1, "")


def note_setup(session: Session, step: Step, setup: StoredSetup) -> None:
    """Add the setup of a new shard to those of its step. The run is locked."""
    if setup.text == _NOTHING_KNOWN or len(setup.text) > LONGEST_SETUP:
        return
    number = repository.number_of(session, step.run_id, setup.digest)
    if number is None:
        number = 1 + repository.newest_number(session, step.run_id)
        if number > MOST_SETUPS:
            return
        repository.add_setup(session, step.run_id, number, setup)
    step.setups = _joined({*_numbers(step.setups), number})


def announce_change(
    session: Session, events: EventBus, principal: Principal, key: StepKey, kind: ChangeKind, body: ChangePut
) -> tuple[ChangeRecord, bool]:
    """Store a change that the trainer announces, overwriting an older one of the kind at the step.

    Return it, and True if it is the first. The detectors replay from its step.
    """
    lock_run(session, principal, key.run_id)
    check_attempt(session, key.run_id, key.attempt)
    values = {name: value for name, value in (("before", body.before), ("after", body.after)) if value is not None}
    row = {**key._asdict(), "kind": kind, "note": body.note, "values": values, "announced_at_us": now_us()}
    created = repository.put(session, row)
    if created:
        events.publish(session, ChangeAnnounced(*key))
    change = ChangeRecord(
        step=key.step,
        attempt=key.attempt,
        kind=kind,
        note=body.note,
        before=body.before,
        after=body.after,
        rebaseline=True,
    )
    return change, created


def list_changes(
    session: Session, principal: Principal, run_id: str, cursor: str | None, limit: int
) -> Page[ChangeRecord]:
    """Return one page of a run's changes at active steps, by step."""
    get_run(session, principal, run_id)
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else _START
    # The page before may have ended within a step.
    found = _changes(session, run_id, Chosen(limit + 2 + len(CHANGE_KINDS), from_step=max(after[0], 0)))
    return page_of([change for change in found if _key_of(change) > after][: limit + 1], limit, _key_of)


def newest_changes(session: Session, run_id: str, limit: int) -> list[ChangeRecord]:
    """Return the newest `limit` changes at active steps, in order."""
    return _changes(session, run_id, Chosen(limit, newest=True))[-limit:]


def rebaselined_steps(session: Session, run_id: str, attempts: Sequence[AttemptStart]) -> list[int]:
    """Return the active steps at which baselines begin anew, in order."""
    found = repository.announced_steps(session, run_id)
    return sorted(step for step, attempt in found if active_attempt_of(attempts, step) == attempt)


def _changes(session: Session, run_id: str, chosen: Chosen) -> list[ChangeRecord]:
    """Return the chosen changes of both kinds, which may be more than the limit, by step and kind."""
    attempts = attempts_of_run(session, run_id)
    announced = [_announced(each) for each in repository.announced(session, run_id, attempts, chosen)]
    return sorted([*_observed(session, run_id, attempts, chosen), *announced], key=_key_of)


def _observed(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], chosen: Chosen
) -> Iterator[ChangeRecord]:
    """Yield the changes of the setup: where the attempts say so, and where the shards of closed steps do."""
    setups = repository.setups_of_run(session, run_id)
    ranges = active_ranges(attempts)[::-1]
    found_fingerprints = fingerprints_of_attempts(session, run_id, [each.attempt for each in ranges])
    fingerprints = {attempt: canonical_json({"attempt": each}) for attempt, each in found_fingerprints.items()}
    before: tuple[str | None, int] | None = None
    for active in ranges:
        first = repository.first_named(session, run_id, active) if setups else None
        if before is not None:
            named, older = before
            found = {active.first: _differences((fingerprints[older],), (fingerprints[active.attempt],))}
            if first is not None and named is not None:
                found[first[0]] = [*found.get(first[0], []), *_between(setups, named, first[1])]
            for step, fields in found.items():
                if fields and step >= chosen.from_step:
                    yield _of_setup(step, active.attempt, fields)
        if len(setups) > 1:
            for change in repository.changes_within(session, run_id, active, chosen):
                fields = _between(setups, change.before, change.after)
                if fields:
                    yield _of_setup(change.step, active.attempt, fields)
        last = repository.last_named(session, run_id, active) if setups else None
        before = (last if last is not None or before is None else before[0], active.attempt)


def _of_setup(step: int, attempt: int, fields: list[DifferenceRecord]) -> ChangeRecord:
    return ChangeRecord(step=step, attempt=attempt, kind="setup", differences=tuple(fields), rebaseline=False)


def _between(setups: dict[int, str], before: str, after: str) -> list[DifferenceRecord]:
    """Return what differs between the setups of two steps, by their numbers; empty if one only says more."""
    old, new = (tuple(setups[number] for number in _numbers(each)) for each in (before, after))
    return [] if old == new else _differences(old, new)


@lru_cache(maxsize=256)
def _differences(before: tuple[str, ...], after: tuple[str, ...]) -> list[DifferenceRecord]:
    parsed: list[list[Setup]] = [[json.loads(text) for text in side] for side in (before, after)]
    return [DifferenceRecord(name=each.name, before=each.before, after=each.after) for each in differences(*parsed)]


def _announced(change: StoredChange) -> ChangeRecord:
    return ChangeRecord(
        step=change.step,
        attempt=change.attempt,
        kind=change.kind,  # type: ignore[arg-type]
        note=change.note,
        **change.values,
        rebaseline=True,
    )


def _numbers(setups: str | None) -> list[int]:
    return [int(number) for number in setups.split(",")] if setups else []


def _joined(numbers: set[int]) -> str:
    return ",".join(str(number) for number in sorted(numbers))


def _key_of(change: ChangeRecord) -> tuple[int, str]:
    return (change.step, change.kind)
