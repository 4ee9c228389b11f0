"""Attempts: a run's start and its resumes, and which steps of it are active.

A step is active in the newest attempt whose `resume_step` ≤ step. Steps of older attempts from there on are superseded;
they are kept and not shown by default.

Attempts are numbered in the order of registration, but the newer of two is the one whose launch began later: a launch
whose data stayed in its spool while the service was away may register after the next launch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Path, Response, status
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, and_, false, func, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

from foreshock.api.records import from_attributes
from foreshock.api.runs import AttemptRecord
from foreshock.clock import now_us
from foreshock_service.platform import pagination, parameters, problem, security
from foreshock_service.platform.context import Context, EventBus
from foreshock_service.platform.database.engine import insert_if_absent, upsert
from foreshock_service.platform.database.tables import OLDEST_ATTEMPT_FIRST, Attempt, AttemptClient, Step
from foreshock_service.runs import due, runs
from foreshock_service.runs.events import AttemptStarted, ItemsLost, StepKey

NO_BOUND = 2**62


class AttemptStart(NamedTuple):
    """The number of an attempt, and the step that it begins at."""

    attempt: int
    resume_step: int


class ActiveRange(NamedTuple):
    """Range of steps `first` ≤ step < `end`, active in `attempt`."""

    attempt: int
    first: int
    end: int


def active_ranges(attempts: Sequence[AttemptStart], first: int = 0, last: int = NO_BOUND) -> list[ActiveRange]:
    """Return the ranges of active steps within `first` ≤ step ≤ `last`, newest attempt first.

    `attempts` are in the order in which they began. The ranges do not overlap; each begins where the next one ends.
    """
    ranges: list[ActiveRange] = []
    end = last + 1
    for attempt in reversed(attempts):
        begin = max(attempt.resume_step, first)
        if begin < end:
            ranges.append(ActiveRange(attempt.attempt, begin, end))
            end = begin
    return ranges


def active_attempt_of(attempts: Sequence[AttemptStart], step: int) -> int | None:
    """Return the attempt in which the step is active; None if every attempt begins after it."""
    return next((each.attempt for each in reversed(attempts) if each.resume_step <= step), None)


def in_ranges(ranges: Iterable[ActiveRange], table: Any) -> ColumnElement[bool]:
    """Return the SQL condition for rows of these ranges in a table of steps."""
    conditions = [
        and_(table.attempt == attempt, table.step >= first, table.step < end) for attempt, first, end in ranges
    ]
    return or_(*conditions) if conditions else false()


def active_rows(session: Session, run_id: str, table: Any, first: int = 0, last: int = NO_BOUND) -> ColumnElement[bool]:
    """Return the SQL condition for rows of the run's active steps, `first` ≤ step ≤ `last`, in a table of steps."""
    return in_ranges(ranges_of_run(session, run_id, first, last), table)


def ranges_of_run(session: Session, run_id: str, first: int = 0, last: int = NO_BOUND) -> list[ActiveRange]:
    """Return the ranges of the run's active steps within `first` ≤ step ≤ `last`, newest attempt first."""
    return active_ranges(attempts_of_run(session, run_id), first, last)


def is_active(session: Session, step: Any) -> bool:
    """Return whether a step, which is a key, an event or a row, is active in its attempt."""
    return bool(active_attempt_of(attempts_of_run(session, step.run_id), step.step) == step.attempt)


def began_later(attempt: Any, other: Any) -> ColumnElement[bool]:
    """Return the SQL condition that an attempt is newer than another of its run, given the table or an alias of it."""
    return tuple_(attempt.began_at_us, attempt.attempt) > tuple_(other.began_at_us, other.attempt)


def is_superseded(run_id: Any, attempt: Any, step: Any) -> ColumnElement[bool]:
    """Return the SQL condition that a newer attempt holds the step, given the three columns of a table.

    `active_rows` is faster for the steps of one run.
    """
    own, later = aliased(Attempt), aliased(Attempt)
    query = select(later.attempt).join(own, and_(own.run_id == later.run_id, own.attempt == attempt))
    return query.where(later.run_id == run_id, later.resume_step <= step, began_later(later, own)).exists()


router = parameters.api_router(prefix="/v1/runs/{run}/attempts", tags=["attempts"])

Count = Annotated[int, Field(ge=0, lt=2**63)]
_KNOWN = "foreshock.attempts"
_LONGEST_AGE_SECONDS = 10 * 365 * 86400


class AttemptCreate(BaseModel):
    """An attempt to get or create; `key` is the client's own name for this start or resume."""

    key: parameters.Name
    resume_step: parameters.Step = Field(default=0, description="the first step that this attempt computes")
    fingerprint: parameters.JsonObject = Field(default_factory=dict)
    heartbeats: bool = Field(
        default=False, description="the client sends heartbeats, so that its silence has a meaning"
    )
    age_seconds: float = Field(
        default=0.0,
        ge=0.0,
        le=_LONGEST_AGE_SECONDS,
        allow_inf_nan=False,
        description="how long ago this start or resume was; the attempt that began last is the newest",
    )


class Heartbeat(BaseModel):
    """A sign of life of a client, with the items that it could not deliver since it was created."""

    shard: parameters.Step | None = Field(default=None, description="the rank's shard, if the client knows it")
    undelivered: Count = Field(default=0, description="kept by the client, which tries again")
    rejected: Count = 0
    dropped: Count = 0
    invalid: Count = 0
    reason: str | None = Field(default=None, max_length=1000, pattern=r"^[^\x00]*$")
    remarks: list[Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]] = Field(
        default_factory=list, max_length=20, description="what the framework's hook warns of, such as a refused column"
    )

    @property
    def lost(self) -> int:
        """The items that the client does not try to deliver again."""
        return self.rejected + self.dropped + self.invalid


class AttemptNotFound(problem.ProblemError, status=404, problem_type="attempt-not-found"):
    """The run has no such attempt."""


class AttemptConflict(problem.ProblemError, status=409, problem_type="attempt-conflict"):
    """Conflict: an attempt of that key exists and begins at another step."""


@router.post(
    "", status_code=status.HTTP_201_CREATED, responses={200: {"model": AttemptRecord, "description": "It existed"}}
)
def create_attempt(
    run: runs.RunIdentifier,
    body: AttemptCreate,
    context: Context,
    principal: security.Ingester,
    response: Response,
) -> AttemptRecord:
    """Get or create the attempt of this key: 201 if it is new. A step is active in the newest attempt that holds it."""
    attempt, created = context.database.write(
        lambda session: get_or_create_attempt(session, context.events, principal, run, body)
    )
    if not created:
        response.status_code = status.HTTP_200_OK
    return from_attributes(AttemptRecord, attempt)


@router.put("/{attempt}/clients/{client}", status_code=status.HTTP_204_NO_CONTENT)
def put_heartbeat(
    run: runs.RunIdentifier,
    attempt: Annotated[int, Path(ge=1, le=parameters.LARGEST_STEP)],
    client: Annotated[str, Path(max_length=200, pattern=r"^[A-Za-z0-9._-]+$")],
    body: Heartbeat,
    context: Context,
    principal: security.Ingester,
) -> None:
    """Note that a client of the attempt lives, and what it could not deliver."""
    row = {"run_id": run, "attempt": attempt, "client": client, "seen_at_us": now_us(), **body.model_dump()}
    row["remarks"] = body.remarks or None

    def note(session: Session) -> None:
        locked = runs.lock_run(session, principal, run)
        check_attempt(session, run, attempt)
        before = _lost_by_clients(session, run, attempt)
        known = session.get(AttemptClient, (run, attempt, client))
        if row["remarks"] != (known and known.remarks):
            due.mark(session, run)
        upsert(session, AttemptClient, [row], ("run_id", "attempt", "client"))
        runs.note_sign_of_life(session, context.events, locked)
        lost = _lost_by_clients(session, run, attempt) if body.lost else before
        if lost > before:
            context.events.publish(session, ItemsLost(run, attempt, locked.last_step or 0, lost, body.reason))

    context.database.write(note)


@router.get("")
def list_attempts(
    asked: runs.RunToRead, cursor: pagination.Cursor = None, limit: pagination.Limit = 200
) -> pagination.Page[AttemptRecord]:
    """List the attempts of a run, by number."""
    with asked.reading() as session:
        return pagination.page_of_query(
            session, select(Attempt).where(Attempt.run_id == asked.run), (Attempt.attempt,), cursor, limit,
            lambda rows: [from_attributes(AttemptRecord, row) for (row,) in rows], rising=True,
        )  # fmt: skip


def get_or_create_attempt(
    session: Session, events: EventBus, principal: security.Principal, run_id: str, body: AttemptCreate
) -> tuple[Attempt, bool]:
    """Return the attempt of this key, and True if it is new; raise AttemptConflict if `resume_step` differs."""
    run = runs.lock_run(session, principal, run_id)
    ends = select(func.max(Attempt.attempt), func.max(Attempt.created_at_us)).where(Attempt.run_id == run_id)
    newest, latest_us = session.execute(ends).one()
    created_at_us = now_us()
    # By this service's clock. The client sends an age, not a time: the clocks of two nodes may differ by more than the
    # time between two launches, and a resume, which is registered within seconds, would seem older. The age is
    # subtracted from a time no earlier than the newest registration: so a start without an age is never an older one,
    # even if the clock was set back or the clocks of several services differ.
    began_at_us = max(created_at_us, latest_us or 0) - round(body.age_seconds * 1e6)
    row = {
        "run_id": run_id,
        "attempt": (newest or 0) + 1,
        "created_at_us": created_at_us,
        "began_at_us": began_at_us,
        **body.model_dump(exclude={"heartbeats", "age_seconds"}),
    }
    created = insert_if_absent(session, Attempt, row)
    session.info.pop(_KNOWN, None)
    attempt = session.scalars(select(Attempt).where(Attempt.run_id == run_id, Attempt.key == body.key)).one()
    if attempt.resume_step != body.resume_step:
        raise AttemptConflict(
            f"the attempt {body.key!r} resumes at step {attempt.resume_step}, not {body.resume_step}: "
            "give each resume its own key"
        )
    starts = attempts_of_run(session, run_id)
    is_newest = starts[-1].attempt == attempt.attempt
    if body.heartbeats and created and is_newest:
        # An older attempt is registered late, and a known one again, by a client that sends what another left.
        runs.note_sign_of_life(session, events, run, resumed=True)
    is_active_somewhere = any(each.attempt == attempt.attempt for each in active_ranges(starts))
    if created and attempt.attempt > 1 and is_active_somewhere:
        held = select(func.max(Step.step)).where(Step.run_id == run_id, active_rows(session, run_id, Step))
        run.last_step = session.scalar(held)
        events.publish(session, AttemptStarted(run_id, attempt.attempt, attempt.resume_step, is_newest))
    return attempt, created


def _lost_by_clients(session: Session, run_id: str, attempt: int) -> int:
    table = AttemptClient
    lost = func.sum(table.rejected + table.dropped + table.invalid)
    return int(session.scalar(select(lost).where(table.run_id == run_id, table.attempt == attempt)) or 0)


def remarks_of_hooks(session: Session, run_id: str) -> list[str]:
    """Return what the hooks of the newest attempt warn of, each sentence once."""
    newest = attempts_of_run(session, run_id)[-1:]
    of_newest = [AttemptClient.attempt == each.attempt for each in newest]
    query = select(AttemptClient.remarks).where(AttemptClient.run_id == run_id, *of_newest)
    rows = session.scalars(query.order_by(AttemptClient.shard, AttemptClient.client))
    return list(dict.fromkeys(remark for remarks in rows for remark in remarks or ()))


def attempts_of_run(session: Session, run_id: str) -> Sequence[AttemptStart]:
    """Return the start of every attempt of a run, in the order in which they began; queried once per session."""
    known: dict[str, Sequence[AttemptStart]] = session.info.setdefault(_KNOWN, {})
    if run_id not in known:
        query = select(Attempt.attempt, Attempt.resume_step).where(Attempt.run_id == run_id)
        query = query.order_by(*OLDEST_ATTEMPT_FIRST)
        known[run_id] = [AttemptStart(*row) for row in session.execute(query)]
    return known[run_id]


def fingerprints_of_attempts(session: Session, run_id: str, attempts: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return the fingerprints with which these attempts were started, by number."""
    query = select(Attempt.attempt, Attempt.fingerprint).where(Attempt.run_id == run_id, Attempt.attempt.in_(attempts))
    return {row.attempt: row.fingerprint for row in session.execute(query)}


def find_attempt(session: Session, run_id: str, attempt: int) -> Attempt | None:
    return session.scalar(select(Attempt).where(Attempt.run_id == run_id, Attempt.attempt == attempt))


def check_attempt(session: Session, run_id: str, attempt: int) -> None:
    if all(each.attempt != attempt for each in attempts_of_run(session, run_id)):
        raise AttemptNotFound(f"the run has no attempt {attempt}: create it with POST /v1/runs/{run_id}/attempts")


def rows_of_steps(
    session: Session, run_id: str, attempt: int | None, table: Any, first: int = 0, last: int = NO_BOUND
) -> ColumnElement[bool]:
    """Return the SQL condition for rows of one attempt (None: of the active steps). Raises AttemptNotFound."""
    if attempt is None:
        return active_rows(session, run_id, table, first, last)
    check_attempt(session, run_id, attempt)
    return in_ranges([ActiveRange(attempt, first, last + 1)], table)


def visible_step(
    session: Session, principal: security.Principal, run_id: str, step: int, attempt: int | None
) -> StepKey:
    """Return the key of a step that the principal may see, as `resolve_step` does. Raises RunNotFound, RunDeleted."""
    runs.get_run(session, principal, run_id)
    return resolve_step(session, run_id, step, attempt)


@dataclass(frozen=True, slots=True)
class AskedStep(runs.AskedRun):
    """The step that a request names; `attempt` None: the attempt in which it is active."""

    step: int
    attempt: int | None

    def key(self, session: Session) -> StepKey:
        """Return the key of the step if the principal may see it. Raises RunNotFound, RunDeleted, AttemptNotFound."""
        return visible_step(session, self.principal, self.run, self.step, self.attempt)


async def _asked_step(
    run: runs.RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    attempt: parameters.ActiveOrAttempt = None,
) -> AskedStep:
    return AskedStep(context, principal, run, step, attempt)


StepOfRequest = Annotated[AskedStep, Depends(_asked_step)]


def resolve_step(session: Session, run_id: str, step: int, attempt: int | None) -> StepKey:
    """Return the step's key in `attempt`; None: in the attempt in which it is active. Raises AttemptNotFound."""
    if attempt is not None:
        check_attempt(session, run_id, attempt)
        return StepKey(run_id, attempt, step)
    active = active_attempt_of(attempts_of_run(session, run_id), step)
    if active is None:
        raise AttemptNotFound(f"no attempt of the run holds step {step}")
    return StepKey(run_id, active, step)
