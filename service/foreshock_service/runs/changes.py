"""Changes within a run: announced by its trainer, or read from the setups that its shards name.

Changes of the setup are derived on request, so that the order in which the shards arrived does not matter. In the
common case, a run that names only one setup, this takes one query.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, cast

from fastapi import Response, status
from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock import changes, clock, digests
from foreshock.api.runs import ChangeRecord, DifferenceRecord, Plain
from foreshock.fingerprint import Fingerprint
from foreshock_service.platform import pagination, parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.engine import insert_if_absent, insert_rows, upsert
from foreshock_service.platform.database.tables import AnnouncedChange, RunSetup, Step
from foreshock_service.runs import attempts, runs, steps
from foreshock_service.runs.events import StepKey

router = parameters.api_router(prefix="/v1/runs/{run}/changes", tags=["changes"])

MOST_SETUPS = 100
"""Setups of a run that are stored; shards with further setups count as if they named none."""
LONGEST_SETUP = 100_000
"""Characters of a setup as JSON; a longer one is not stored."""

Text = Annotated[str, StringConstraints(max_length=1000, pattern=parameters.NO_NUL)]
Setup = Mapping[str, Any]
"""`engine`, `trainer` and `sampling`, each with its known fields; a part that is not known is absent."""


class ChangePut(BaseModel):
    """A change that the trainer announces; the baselines of the detectors begin anew at its step."""

    note: Text | None = Field(default=None, description="what changed, in words")
    before: Text | float | None = Field(default=None, description="such as the old length cap")
    after: Text | float | None = None


@router.put(
    "/{step}/{kind}",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": ChangeRecord, "description": "It was announced before; the newer words hold"}},
)
def put_change(
    run: runs.RunIdentifier,
    step: parameters.StepPath,
    kind: changes.ChangeKind,
    body: ChangePut,
    context: Context,
    principal: security.Ingester,
    response: Response,
    attempt: parameters.AttemptQuery = 1,
) -> ChangeRecord:
    """Announce a change of the length cap, curriculum or data; the detectors' baselines begin anew at its step."""
    change, created = context.database.write(
        lambda session: announce_change(session, principal, StepKey(run, attempt, step), kind, body)
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return change


@router.get("")
def list_changes(
    asked: runs.RunToRead, cursor: pagination.Cursor = None, limit: pagination.Limit = 200
) -> pagination.Page[ChangeRecord]:
    """List changes by step: announced ones, and those of the setup that the rollouts name."""
    with asked.reading() as session:
        after = pagination.decode_cursor(cursor, (int, str)) if cursor is not None else (-1, "")
        found = [change for change in _changes(session, asked.run) if _key_of(change) > after]
    return pagination.page_of(found[: limit + 1], limit, _key_of)


def note_setup(session: Session, step: Step, setup: str) -> None:
    """Add the setup of a new shard, as canonical JSON, to those of its step. The run is locked."""
    if setup == "{}" or len(setup) > LONGEST_SETUP:
        return
    digest, of_run = digests.digest_of_bytes(setup.encode()), RunSetup.run_id == step.run_id
    number = session.scalar(select(RunSetup.number).where(of_run, RunSetup.digest == digest))
    if number is None:
        number = 1 + (session.scalar(select(func.max(RunSetup.number)).where(of_run)) or 0)
        if number > MOST_SETUPS:
            return
        row = {"run_id": step.run_id, "number": number, "digest": digest, "setup": setup}
        insert_rows(session, RunSetup, [row])
    step.setups = ",".join(map(str, sorted({*_numbers(step.setups), number})))


def announce_change(
    session: Session, principal: security.Principal, key: StepKey, kind: changes.ChangeKind, body: ChangePut
) -> tuple[ChangeRecord, bool]:
    """Store a change that the trainer announces, or its newer words; return it, and True if it is the first."""
    runs.lock_run(session, principal, key.run_id)
    attempts.check_attempt(session, key.run_id, key.attempt)
    values = {name: value for name, value in (("before", body.before), ("after", body.after)) if value is not None}
    row = {**key._asdict(), "kind": kind, "note": body.note, "values": values, "announced_at_us": clock.now_us()}
    created = insert_if_absent(session, AnnouncedChange, row)
    if created:
        steps.mark_step(session, key)
    else:
        upsert(session, AnnouncedChange, [row], ("run_id", "attempt", "step", "kind"))
    return _announced(AnnouncedChange(**row)), created


def newest_changes(session: Session, run_id: str, limit: int) -> list[ChangeRecord]:
    """Return the newest `limit` changes at active steps, in order."""
    return _changes(session, run_id)[-limit:]


def changes_at(session: Session, run_id: str, step: int) -> list[ChangeRecord]:
    return [each for each in _changes(session, run_id) if each.step == step]


def engine_of_newest_step(session: Session, run_id: str) -> Fingerprint | None:
    """Return the engine's fingerprint that the newest step with a setup names; None if it names none or several."""
    active = attempts.active_rows(session, run_id, Step)
    query = select(Step.setups).where(Step.run_id == run_id, active, Step.setups.is_not(None))
    numbers = _numbers(session.scalar(query.order_by(Step.step.desc()).limit(1)))
    of_step = (RunSetup.run_id == run_id, RunSetup.number.in_(numbers))
    setups: list[Setup] = [json.loads(text) for text in session.scalars(select(RunSetup.setup).where(*of_step))]
    engines = {digests.canonical_json(each["engine"]): each["engine"] for each in setups if "engine" in each}
    return Fingerprint.from_dict(*engines.values()) if len(engines) == 1 else None


def rebaselined_steps(session: Session, run_id: str) -> list[int]:
    """Return the active steps at which baselines are reset, in order."""
    table = AnnouncedChange
    query = select(table.step).where(table.run_id == run_id, attempts.active_rows(session, run_id, table))
    return list(session.scalars(query.distinct().order_by(table.step)))


def _changes(session: Session, run_id: str) -> list[ChangeRecord]:
    active = attempts.active_rows(session, run_id, AnnouncedChange)
    announced = session.scalars(select(AnnouncedChange).where(AnnouncedChange.run_id == run_id, active))
    return sorted([*_observed(session, run_id), *map(_announced, announced)], key=_key_of)


def _observed(session: Session, run_id: str) -> list[ChangeRecord]:
    """Return the changes of the setup: between the fingerprints of attempts, and between shards of closed steps."""
    found: defaultdict[tuple[int, int], list[DifferenceRecord]] = defaultdict(list)
    ranges = attempts.ranges_of_run(session, run_id)[::-1]
    if len(ranges) > 1:
        own = attempts.fingerprints_of_attempts(session, run_id, [each.attempt for each in ranges])
        for older, newer in pairwise(ranges):
            sides = ({"attempt": own[each.attempt]} for each in (older, newer))
            found[newer.first, newer.attempt] += differences(*([side] for side in sides))
    numbered = select(RunSetup.number, RunSetup.setup).where(RunSetup.run_id == run_id)
    setups = {row.number: row.setup for row in session.execute(numbered)}
    if len(setups) > 1:
        before = func.lag(Step.setups).over(order_by=Step.step).label("before")
        naming = (Step.run_id == run_id, attempts.in_ranges(ranges, Step), Step.closed_at_us.is_not(None))
        steps = select(Step.step, Step.attempt, before, Step.setups).where(*naming, Step.setups.is_not(None)).subquery()
        for step, attempt, old, new in session.execute(select(steps).where(steps.c.before != steps.c.setups)):
            found[step, attempt] += _between(setups, old, new)
    return [
        ChangeRecord(step=step, attempt=attempt, kind="setup", differences=tuple(fields), rebaseline=False)
        for (step, attempt), fields in found.items()
        if fields
    ]


def _between(setups: dict[int, str], before: str, after: str) -> list[DifferenceRecord]:
    """Return the differences between the setups of two steps, given by number; empty if one only has more fields."""
    old, new = ([setups[number] for number in _numbers(each)] for each in (before, after))
    return [] if old == new else differences(list(map(json.loads, old)), list(map(json.loads, new)))


def differences(before: Sequence[Setup], after: Sequence[Setup]) -> list[DifferenceRecord]:
    """Return the fields in which two sets of setups differ, such as `engine.dtype`, by name, with the values of each.

    Values are sorted as text; one that is no text, number or bool is given as JSON. A field, or a whole part, that one
    side does not know is no difference: it was not logged there.
    """
    old, new = [_fields(each) for each in before], [_fields(each) for each in after]
    found = []
    for name in sorted({name for fields in (*old, *new) for name in fields}):
        values_before, values_after = _values(old, name), _values(new, name)
        if values_before and values_after and values_before != values_after:
            values = {"before": tuple(values_before.values()), "after": tuple(values_after.values())}
            found.append(DifferenceRecord(name=name, **values))
    return found


def _fields(setup: Setup) -> dict[str, Any]:
    """Return the fields by dotted name; the entries of a mapping such as `flags` are fields of their own."""
    found: dict[str, Any] = {}
    for part, fields in setup.items():
        for name, value in fields.items():
            if isinstance(value, Mapping):
                found |= {f"{part}.{name}.{key}": entry for key, entry in value.items()}
            else:
                found[f"{part}.{name}"] = value
    return found


def _values(setups: Sequence[Mapping[str, Any]], name: str) -> dict[str, Plain]:
    """Return the distinct values of a field by their JSON text, sorted by it."""
    values = {digests.canonical_json(fields[name]): fields[name] for fields in setups if fields.get(name) is not None}
    return {text: value if isinstance(value, Plain) else text for text, value in sorted(values.items())}


def _announced(change: AnnouncedChange) -> ChangeRecord:
    return ChangeRecord(
        step=change.step,
        attempt=change.attempt,
        kind=cast("changes.ChangeKind", change.kind),
        note=change.note,
        **change.values,
        rebaseline=True,
    )


def _numbers(setups: str | None) -> list[int]:
    return [int(number) for number in setups.split(",")] if setups else []


def _key_of(change: ChangeRecord) -> pagination.CursorKey:
    return (change.step, change.kind)
