"""Runs: get or create, list, change, delete (a tombstone stays); and the run that a path names."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

from fastapi import Depends, Path, Query, Request, Response, status
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from foreshock import clock, errors, page_addresses
from foreshock.api import diagnosis, records
from foreshock.api.runs import RunRecord, ShownRunState
from foreshock.diagnosis.quantities import check_declared
from foreshock.learning_rate.levers import Correction
from foreshock.learning_rate.modes import AdviceMode
from foreshock.model_kind import ModelKind
from foreshock_service.platform import audit, pagination, parameters, problem, security
from foreshock_service.platform.context import Context, EventBus, ServiceContext
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.tables import NEWEST_ATTEMPT_FIRST, Attempt, Run, is_identifier, new_identifier
from foreshock_service.runs import due
from foreshock_service.runs.diagnoses import has_verdict, verdicts_of_runs
from foreshock_service.runs.events import AdviceModeChanged, RunBecameStale, RunRemoved, TrainerHeard
from foreshock_service.runs.failing_runs import RunIsolated

RunState = Literal["running", "finished", "failed"]
"""The states that a client or an operator sets."""

ENDED: Final[tuple[RunState, ...]] = ("finished", "failed")
"""States of a run that gets no advice until it runs again. A stale run is not one: it may only be unreachable."""


def _declared(names: dict[str, str]) -> dict[str, str]:
    check_declared(names)
    return names


ScalarNames = Annotated[
    dict[parameters.Name, parameters.Name], parameters.at_most(100), AfterValidator(_declared), Field(max_length=100)
]
"""The run's own names of the quantities that are watched: {"reward": "my/score"}."""

Tag = Annotated[parameters.Name, Field(max_length=60)]
Tags = Annotated[list[Tag], AfterValidator(lambda tags: list(dict.fromkeys(tags)))]
Note = Annotated[str, StringConstraints(max_length=2000, pattern=parameters.NO_NUL, strip_whitespace=True)]


TrackerUrl = Annotated[str, StringConstraints(max_length=1000, pattern=r"^https?://[^\s\x00-\x1f\x7f]+$")]


def _no_identifier(key: str) -> str:
    if is_identifier("run", key):
        raise ValueError(f"{key!r} has the form of an id that the service gives to runs: choose another key")
    return key


def _known_correction(text: str) -> str:
    try:
        Correction.parse(text)
    except errors.InvalidArgumentError as error:
        raise ValueError(error.message) from error
    return text


AskedCorrection = Annotated[
    parameters.Name,
    AfterValidator(_known_correction),
    Field(description="the one to advise if any: `token_tis`, `sequence_mis:2`; absent: token TIS"),
]
_OF_A_LEVER = "used if none was chosen before"
_OF_LEVERS = ("correction_mode", "rollback_mode", "correction")


class RunCreate(BaseModel):
    """Run to get or create: (project, key) identifies it; the other fields are used only if it is new."""

    key: Annotated[parameters.Name, AfterValidator(_no_identifier)] = Field(
        description="the client's own name for the run, unique in the project; not of the form of an id"
    )
    project: parameters.Name = page_addresses.DEFAULT_PROJECT
    name: parameters.Name | None = None
    model: parameters.Name | None = None
    trainer: parameters.Name | None = None
    engine: parameters.Name | None = None
    hardware: parameters.Name | None = None
    initial_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    length_cap: int | None = Field(default=None, gt=0, lt=2**31)
    model_kind: ModelKind | None = Field(
        default=None, description="decides the healthy ranges; absent: derived from an announced checkpoint"
    )
    advice_mode: AdviceMode = Field(default="shadow", description="of the learning rate")
    correction_mode: AdviceMode | None = Field(default=None, description=_OF_A_LEVER)
    rollback_mode: AdviceMode | None = Field(default=None, description=_OF_A_LEVER)
    correction: AskedCorrection | None = None
    scalar_names: ScalarNames | None = Field(
        default=None,
        description='the run\'s own scalars by the well-known name of what they are: {"reward": "my/score"}; '
        "a declared quantity has no other name",
    )
    tags: Tags = Field(default=[], max_length=20)
    note: Note | None = None
    baseline: parameters.Name | None = Field(default=None, description="id of the run to compare with")
    tracker_url: TrackerUrl | None = Field(default=None, description="page of the run in a tracker, such as W&B")


class RunUpdate(BaseModel):
    """Changes of a run; absent fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    state: RunState | None = None
    attempt: parameters.Step | None = Field(
        default=None, description="whose trainer reports the state; the state stays if another attempt is the newest"
    )
    name: parameters.Name | None = None
    advice_mode: AdviceMode | None = Field(default=None, description="of the learning rate")
    correction_mode: AdviceMode | None = None
    rollback_mode: AdviceMode | None = None
    correction: AskedCorrection | None = None
    model_kind: ModelKind | None = Field(
        default=None, description="null: remove the declaration, so that the checkpoint's kind is used"
    )
    scalar_names: ScalarNames | None = Field(default=None, description="replaces the declaration; null: removes it")
    tags: Tags | None = Field(default=None, max_length=20, description="replaces the tags")
    note: Note | None = Field(default=None, description="null: removes it")
    baseline: parameters.Name | None = Field(default=None, description="id of the run to compare with; null: none")
    tracker_url: TrackerUrl | None = Field(default=None, description="null: removes it")


class RunFilter(NamedTuple):
    """Selects runs; an empty or None field restricts nothing. The project must equal all of `projects`.

    `search` is a part of the name or key, in any case.
    """

    projects: tuple[str, ...] = ()
    key: str | None = None
    model: str | None = None
    model_kind: ModelKind | None = None
    states: tuple[ShownRunState, ...] = ()
    search: str | None = None
    verdict: diagnosis.Verdict | None = None


# Most projects that an error lists.
_MOST_PROJECTS = 10
_REMOVABLE = ("name", "note", "baseline", "tracker_url")
# Fields that change rules or advice: their changes are logged (`platform/audit.py`).
_AUDITED = ("advice_mode", "declared_model_kind", "scalar_names")


class RunNotFound(problem.ProblemError, status=404, problem_type=errors.RUN_NOT_FOUND):
    """Missing run: none with this id or key is visible to this API key."""


class RunDeleted(problem.ProblemError, status=410, problem_type="run-deleted"):
    """Deleted run: it accepts no data and returns none."""


class RunKeyAmbiguous(problem.ProblemError, status=409, problem_type="run-key-ambiguous"):
    """A run key without its project that several visible projects have."""


def get_run(session: Session, principal: security.Principal, run_id: str) -> Run:
    """Return the run if the principal may see it; raise RunNotFound or RunDeleted."""
    return _visible(session.get(Run, run_id), principal, run_id)


def find_run(session: Session, run_id: str) -> Run | None:
    """Return the run, deleted or not; None if it does not exist."""
    return session.get(Run, run_id)


def _visible(run: Run | None, principal: security.Principal, run_id: str) -> Run:
    if run is None or not principal.sees(run.project):
        raise RunNotFound(f"there is no run {run_id}")
    if run.deleted_at_us is not None:
        raise RunDeleted(f"the run {run_id} was deleted")
    return run


def id_of_key(session: Session, principal: security.Principal, project: str | None, key: str) -> str:
    """Return the id of the run with this key, in `project` or in the one visible project that has it.

    Raises RunNotFound if the run does not exist, and also if the principal may not see its project.
    """
    if principal.project is not None and project is None:
        project = principal.project
    if project is not None:
        found = [run] if (run := _find_by_key(session, project, key)) is not None else []
    else:
        query = select(Run).where(Run.key == key).order_by(Run.project).limit(_MOST_PROJECTS)
        found = list(session.scalars(query))
        found = [run for run in found if run.deleted_at_us is None] or found[:1]
    if len(found) > 1:
        projects = ", ".join(run.project for run in found)
        raise RunKeyAmbiguous(f"several projects have a run {key}: add ?project= with one of {projects}")
    return _visible(found[0] if found else None, principal, key).id


def lock_run(session: Session, principal: security.Principal, run_id: str) -> Run:
    """Return the run as `get_run` does, and lock it until this transaction ends.

    Steps of a run close one after the other, so that observers see them in one order.
    """
    return _visible(_find_and_lock(session, run_id), principal, run_id)


def lock_run_for_background(session: Session, run_id: str) -> Run | None:
    """Lock the run for work of the service itself; return None if the run does not exist or is deleted."""
    run = _find_and_lock(session, run_id)
    return run if run is not None and run.deleted_at_us is None else None


def get_or_create_run(
    session: Session, events: EventBus, principal: security.Principal, body: RunCreate
) -> tuple[Run, bool]:
    """Return the run of (project, key), and True if it is new. Raises RunDeleted if that key was deleted before.

    An existing run is changed only by adding a model kind if it has none, and by the address in its tracker.
    """
    if not principal.sees(body.project):
        raise security.ScopeMissing(f"this key is bound to another project than {body.project!r}")
    now = clock.now_us()
    row = {
        "id": new_identifier("run"),
        "state": "running",
        "rollouts": 0,
        "tokens": 0,
        "created_at_us": now,
        "updated_at_us": now,
        **body.model_dump(exclude={"model_kind", *_OF_LEVERS}),
        "declared_model_kind": body.model_kind,
    }
    created = insert_if_absent(session, Run, row)
    run = _find_by_key(session, body.project, body.key)
    assert run is not None
    if run.deleted_at_us is not None:
        raise RunDeleted(f"the run with key {body.key!r} was deleted: choose another key")
    if not created and body.model_kind is not None and run.declared_model_kind is None:
        run = lock_run(session, principal, run.id)
        set_model_kind(session, run, "declared_model_kind", body.model_kind)
    if body.tracker_url not in (None, run.tracker_url):
        run = lock_run(session, principal, run.id)
        run.tracker_url = body.tracker_url
    if any(getattr(body, name) is not None for name in _OF_LEVERS):
        run = lock_run(session, principal, run.id)
        _publish_levers(session, events, run.id, body, by_trainer=True)
    return run, created


def _publish_levers(
    session: Session, events: EventBus, run_id: str, body: RunCreate | RunUpdate, *, by_trainer: bool
) -> None:
    """Publish the modes that are given for the levers beside the rate; they are kept in the log of decisions."""
    asked = None if body.correction is None else Correction.parse(body.correction)
    if body.correction_mode is not None or asked is not None:
        events.publish(session, AdviceModeChanged(run_id, body.correction_mode, "correction", asked, by_trainer))
    if body.rollback_mode is not None:
        events.publish(session, AdviceModeChanged(run_id, body.rollback_mode, "rollback", None, by_trainer))


def list_runs(session: Session, chosen: RunFilter, cursor: str | None, limit: int) -> pagination.Page[RunRecord]:
    """Return one page of the chosen runs that are not deleted, newest first."""
    query = select(Run).where(Run.deleted_at_us.is_(None), *(Run.project == project for project in chosen.projects))
    for column, value in ((Run.key, chosen.key), (Run.model, chosen.model)):
        if value is not None:
            query = query.where(column == value)
    if chosen.model_kind is not None:
        query = query.where(func.coalesce(Run.declared_model_kind, Run.derived_model_kind) == chosen.model_kind)
    if chosen.states:
        query = query.where(Run.state.in_(chosen.states))
    if chosen.verdict is not None:
        query = query.where(has_verdict(chosen.verdict))
    if chosen.search is not None:
        found_in = (Run.name, Run.key)
        query = query.where(or_(*(each.icontains(chosen.search, autoescape=True) for each in found_in)))
    return pagination.page_of_query(
        session, query, (Run.created_at_us, Run.id), cursor, limit,
        lambda rows: run_records(session, [run for (run,) in rows]),
    )  # fmt: skip


def every_run(session: Session, projects: Sequence[str]) -> Sequence[Run]:
    """Return all runs of these projects that are not deleted; no projects: of all."""
    query = select(Run).where(Run.deleted_at_us.is_(None))
    return session.scalars(query.where(Run.project.in_(projects)) if projects else query).all()


def run_records(session: Session, runs: Sequence[Run]) -> list[RunRecord]:
    """Return runs as they are served, each with its diagnosis in one sentence; two queries."""
    ids = [run.id for run in runs]
    verdicts, advancing = verdicts_of_runs(session, ids), due.due_among(session, ids)
    return [
        records.from_attributes(RunRecord, run, diagnosis=verdicts[run.id], advancing=run.id in advancing)
        for run in runs
    ]


def update_run(
    session: Session,
    events: EventBus,
    principal: security.Principal,
    run_id: str,
    changes: RunUpdate,
    reason: str | None = None,
) -> Run:
    """Change the fields that `changes` sets, and log `reason`. Raises RunNotFound, for the baseline too."""
    run = lock_run(session, principal, run_id)
    if changes.baseline is not None:
        get_run(session, principal, changes.baseline)
    before = {name: getattr(run, name) for name in _AUDITED}
    mode_before = run.advice_mode
    left_out = {"attempt", "model_kind", "scalar_names", *_OF_LEVERS}
    newest = select(Attempt.attempt).where(Attempt.run_id == run_id).order_by(*NEWEST_ATTEMPT_FIRST).limit(1)
    if changes.attempt is not None and changes.attempt != session.scalar(newest):
        # An earlier launch reports its end late, from a spool; the run goes on.
        left_out.add("state")
    elif changes.attempt is not None and run.seen_at_us is not None:
        note_sign_of_life(session, events, run)
    for name, value in changes.model_dump(exclude_unset=True, exclude=left_out).items():
        if value is not None or name in _REMOVABLE:
            setattr(run, name, value)
    run.updated_at_us = clock.now_us()
    if run.advice_mode != mode_before:
        events.publish(session, AdviceModeChanged(run_id, "apply" if run.advice_mode == "apply" else "shadow"))
    _publish_levers(session, events, run_id, changes, by_trainer=False)
    if "model_kind" in changes.model_fields_set:
        set_model_kind(session, run, "declared_model_kind", changes.model_kind)
    if "scalar_names" in changes.model_fields_set and run.scalar_names != changes.scalar_names:
        run.scalar_names = changes.scalar_names
        session.flush()
        due.mark(session, run_id, 0)
    changed = {name: getattr(run, name) for name in _AUDITED if getattr(run, name) != before[name]}
    before = {name: before[name] for name in changed}
    changed |= changes.model_dump(include=set(_OF_LEVERS), exclude_none=True)
    if changed:
        changed |= {"reason": reason} if reason is not None else {}
        audit.record(
            session, principal, "run.update", run.id, project=run.project, run_id=run.id, before=before, after=changed
        )
    return run


def note_sign_of_life(session: Session, events: EventBus, run: Run, *, resumed: bool = False) -> None:
    """Note that a trainer of the run lives, and publish TrainerHeard. The run is locked.

    Signs of life are its starts (`resumed`: even after an end), its heartbeats and its report of an end. An upload is
    none: another client may send what a dead trainer left in its spool.
    """
    run.seen_at_us = clock.now_us()
    if resumed or run.state == "stale":
        run.state = "running"
    events.publish(session, TrainerHeard(run.id))


def mark_stale_runs(context: ServiceContext, counted_from_us: int) -> int:
    """Mark the running runs that gave no sign of life for `stale_seconds`; return how many.

    No run is marked before `stale_seconds` after `counted_from_us`, when this process began to listen.
    """
    before = clock.now_us() - int(context.settings.stale_seconds * 1e6)
    if before < counted_from_us:
        return 0
    silent = (Run.state == "running", Run.seen_at_us < before, Run.deleted_at_us.is_(None))
    with context.database.read() as session:
        run_ids = session.scalars(select(Run.id).where(*silent)).all()

    def mark(run_id: str, session: Session) -> bool:
        statement = update(Run).where(Run.id == run_id, *silent).values(state="stale").returning(Run.last_step)
        stale = session.execute(statement.execution_options(synchronize_session=False)).first()
        if stale is not None:
            context.events.publish(session, RunBecameStale(run_id, stale.last_step, context.settings.stale_seconds))
        return stale is not None

    marked = 0
    for run_id in run_ids:
        with RunIsolated(context.database, context.events, run_id):
            marked += context.database.write(partial(mark, run_id))
    return marked


def delete_run(session: Session, events: EventBus, principal: security.Principal, run_id: str) -> None:
    """Put a tombstone on the run: later calls return 410, and its rows and files are removed in the background."""
    run = lock_run(session, principal, run_id)
    run.deleted_at_us = run.updated_at_us = clock.now_us()
    before = {"key": run.key, "state": run.state, "last_step": run.last_step}
    audit.record(session, principal, "run.delete", run.id, project=run.project, run_id=run.id, before=before)
    events.publish(session, RunRemoved(run_id))


def set_model_kind(
    session: Session,
    run: Run,
    column: Literal["declared_model_kind", "derived_model_kind"],
    model_kind: ModelKind | None,
) -> None:
    """Set a column; if the run's effective kind changes, it is judged again, by other ranges. The run is locked."""
    before = run.model_kind
    setattr(run, column, model_kind)
    run.updated_at_us = clock.now_us()
    session.flush()
    if run.model_kind != before:
        due.mark(session, run.id, 0)


def _find_and_lock(session: Session, run_id: str) -> Run | None:
    return session.get(Run, run_id, with_for_update={"key_share": True}, populate_existing=True)


def _find_by_key(session: Session, project: str, key: str) -> Run | None:
    return session.scalar(select(Run).where(Run.project == project, Run.key == key))


_Segment = Annotated[str, Path(max_length=200, pattern=parameters.SEGMENT_PATTERN)]


async def run_of_path(
    request: Request,
    context: Context,
    _: security.Bearer,
    run: Annotated[_Segment, Path(description="id or key of the run; write `/` in a key as `%2F`")],
    project: Annotated[
        parameters.Name | None, Query(description="project of the key, if several projects have it")
    ] = None,
) -> str:
    """Return the id of the run that a path of the API names. Raises RunNotFound, RunKeyAmbiguous."""
    # Trainers address runs by id: no query is made for them.
    if is_identifier("run", run):
        return run
    return await run_in_threadpool(_find_id, context, request, project, run)


async def run_of_page_path(request: Request, context: Context, project: _Segment, key: _Segment) -> str:
    """Return the id of the run that a page's path names. Raises RunNotFound."""
    return await run_in_threadpool(_find_id, context, request, parameters.decoded_segment(project), key)


RunIdentifier = Annotated[str, Depends(run_of_path)]
RunOfPage = Annotated[str, Depends(run_of_page_path)]


def _find_id(context: ServiceContext, request: Request, project: str | None, segment: str) -> str:
    principal = security.authenticate(context, request)
    with context.database.read() as session:
        return id_of_key(session, principal, project, parameters.decoded_segment(segment))


@dataclass(frozen=True, slots=True)
class AskedRun:
    """The run that a request names, and who asks."""

    context: ServiceContext
    principal: security.Principal
    run: str

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session that reads the run. Raises RunNotFound, RunDeleted."""
        with self.context.database.read() as session:
            get_run(session, self.principal, self.run)
            yield session


async def _run_to_read(run: RunIdentifier, context: Context, principal: security.Reader) -> AskedRun:
    return AskedRun(context, principal, run)


RunToRead = Annotated[AskedRun, Depends(_run_to_read)]

router = parameters.api_router(prefix="/v1/runs", tags=["runs"])


@router.post(
    "", status_code=status.HTTP_201_CREATED, responses={200: {"model": RunRecord, "description": "It existed"}}
)
def create_run(body: RunCreate, context: Context, principal: security.Ingester, response: Response) -> RunRecord:
    """Get or create the run of (project, key): 201 if it is new, 200 with the unchanged run otherwise."""

    def create(session: Session) -> tuple[RunRecord, bool]:
        run, created = get_or_create_run(session, context.events, principal, body)
        return run_records(session, [run])[0], created

    record, created = context.database.write(create)
    if not created:
        response.status_code = status.HTTP_200_OK
    return record


@router.get("", name="list_runs")
def list_visible_runs(
    context: Context,
    principal: security.Reader,
    project: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    key: Annotated[parameters.Name | None, Query(description="only runs with this client key: one per project")] = None,
    model: Annotated[parameters.Name | None, Query()] = None,
    model_kind: Annotated[ModelKind | None, Query()] = None,
    state: Annotated[list[ShownRunState] | None, Query(max_length=4, description="absent: all")] = None,
    search: Annotated[parameters.Name | None, Query(description="a part of the name or key, in any case")] = None,
    verdict: Annotated[
        diagnosis.Verdict | None, Query(description="only runs whose diagnosis has this verdict")
    ] = None,
    cursor: pagination.Cursor = None,
    limit: pagination.Limit = 50,
) -> pagination.Page[RunRecord]:
    """List runs, newest first."""
    chosen = RunFilter(principal.projects(project), key, model, model_kind, tuple(state or ()), search, verdict)
    with context.database.read() as session:
        return list_runs(session, chosen, cursor, limit)


@router.get("/{run}")
def read_run(asked: RunToRead) -> RunRecord:
    """Return one run."""
    with asked.reading() as session:
        return run_records(session, [get_run(session, asked.principal, asked.run)])[0]


@router.patch("/{run}", name="update_run")
def patch_run(run: RunIdentifier, body: RunUpdate, context: Context, principal: security.Ingester) -> RunRecord:
    """Change a run's state, name, advice mode or model kind."""

    def update(session: Session) -> RunRecord:
        changed = update_run(session, context.events, principal, run, body)
        return run_records(session, [changed])[0]

    return context.database.write(update)


@router.delete("/{run}", name="delete_run", status_code=status.HTTP_204_NO_CONTENT)
def remove_run(run: RunIdentifier, context: Context, principal: security.Administrator) -> None:
    """Delete a run; later calls that name it, late uploads included, return 410.

    Its rows are deleted in the background, its files after FORESHOCK_REMOVAL_GRACE_SECONDS. Its key stays taken.
    """
    context.database.write(lambda session: delete_run(session, context.events, principal, run))
