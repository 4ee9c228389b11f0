"""Scalars that a source (the trainer, an engine) reports for a step.

Those of a closed step, and those of a run without rollouts, publish ScalarsLogged: its handler marks the run.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response, status
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock import clock, json_values
from foreshock.api.runs import MOST_SCALARS
from foreshock.diagnosis.evaluations import is_evaluation
from foreshock.diagnosis.quantities import FIRST_SOURCE
from foreshock_service.platform import columnar, pagination, parameters, security
from foreshock_service.platform.context import Context, EventBus
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Scalar
from foreshock_service.platform.settings import Settings
from foreshock_service.runs import attempts, runs, steps
from foreshock_service.runs.events import ScalarsLogged, StepKey

router = parameters.api_router(prefix="/v1/runs/{run}", tags=["scalars"])

_MOST_EVALUATIONS = 100
_KEY = ("run_id", "attempt", "step", "source", "name")
_COLUMNS: Mapping[str, columnar.Kind] = {
    "step": "integer", "attempt": "integer", "source": "label", "name": "label", "value": "float"
}  # fmt: skip


class ScalarsPut(BaseModel):
    """Values of one source for one step. Existing names are overwritten; other names of the source stay."""

    source: parameters.Name = "trainer"
    values: Annotated[dict[parameters.Name, float | None], parameters.at_most(MOST_SCALARS)] = Field(
        min_length=1, max_length=MOST_SCALARS, description="null: the source computed a value that is not finite"
    )


class ScalarColumns(BaseModel):
    """Columns of scalars: lists of equal length."""

    step: list[int] = Field(default_factory=list)
    attempt: list[int] = Field(default_factory=list)
    source: list[str] = Field(default_factory=list)
    name: list[str] = Field(default_factory=list)
    value: list[float | None] = Field(default_factory=list)


class ScalarsRead(BaseModel):
    """Scalars by column, ordered by name, source and step."""

    columns: ScalarColumns


@router.put("/steps/{step}/scalars", status_code=status.HTTP_204_NO_CONTENT)
def put_scalars(
    run: runs.RunIdentifier,
    step: parameters.StepPath,
    body: ScalarsPut,
    context: Context,
    principal: security.Ingester,
    attempt: parameters.AttemptQuery = 1,
) -> None:
    """Store a source's values for a step. The request is idempotent."""
    key = StepKey(run, attempt, step)
    context.database.write(lambda session: store_scalars(session, context.events, principal, key, body))


@router.get("/scalars", response_model=ScalarsRead, responses=columnar.FORMATS)
def read_scalars(
    asked: runs.RunToRead,
    request: Request,
    source: Annotated[list[parameters.Name] | None, Query(max_length=100)] = None,
    name: Annotated[list[parameters.Name] | None, Query(max_length=1000)] = None,
    attempt: parameters.ActiveOrAttempt = None,
    from_step: parameters.FromStep = 0,
    to_step: parameters.ToStep = parameters.LARGEST_STEP,
    max_points: parameters.MaxPoints = None,
    format_name: columnar.Format = None,
) -> Response:
    """Return scalars by column, ordered by name, source and step: JSON, CSV or Parquet.

    A curve of `max_points` is one name of one source.
    """
    media_type = columnar.choose_format(request.headers.get("accept"), format_name)
    parameters.check_step_range(from_step, to_step)
    with asked.reading() as session:
        chosen = attempts.rows_of_steps(session, asked.run, attempt, Scalar, from_step, to_step)
        table = scalar_table(session, asked.context.settings, asked.run, chosen, source, name, max_points)
    return columnar.columnar_response(request, columnar.render(table, media_type), media_type)


def scalar_table(
    session: Session,
    settings: Settings,
    run_id: str,
    chosen: ColumnElement[bool],
    sources: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    max_points: int | None = None,
) -> columnar.ColumnTable:
    """Return step, attempt, source, name and value of chosen rows, ordered by name, source, step and attempt.

    No sources or names: all. Raises AnswerTooLarge beyond the settings' caps, before more is read.
    """
    among = pagination.among((Scalar.source, sources), (Scalar.name, names))
    query = select(*(getattr(Scalar, column) for column in _COLUMNS)).where(Scalar.run_id == run_id, chosen, *among)
    most = columnar.most_values(settings, max_points)
    table = columnar.read_columns(session, query, _COLUMNS, most, {}).sorted_by("name", "source", "step", "attempt")
    if max_points is not None:
        table = columnar.keep_extremes(table, ("name", "source"), ("value",), max_points)
    columnar.check_answer(table, settings.max_answer_values)
    return table


def store_scalars(
    session: Session, events: EventBus, principal: security.Principal, key: StepKey, body: ScalarsPut
) -> None:
    """Store the scalars of a source for a step, before or after the step closes."""
    run = runs.lock_run(session, principal, key.run_id)
    attempts.check_attempt(session, key.run_id, key.attempt)
    known = run.evaluation_names or []
    if found := sorted({name for name in body.values if is_evaluation(name)}.difference(known)):
        run.evaluation_names = [*known, *found][:_MOST_EVALUATIONS]
    now = clock.now_us()
    rows: list[dict[str, Any]] = [
        {
            **key._asdict(),
            "source": body.source,
            "name": name,
            "value": json_values.finite_or_none(value),
            "received_at_us": now,
        }
        for name, value in sorted(body.values.items())
    ]
    upsert(session, Scalar, rows, _KEY)
    if run.last_step is None or steps.is_closed(session, key):
        events.publish(session, ScalarsLogged(*key, frozenset(body.values)))


def names_of_run(session: Session, run_id: str) -> Sequence[str]:
    return session.scalars(select(Scalar.name).where(Scalar.run_id == run_id).distinct().order_by(Scalar.name)).all()


def scalars_of_step(session: Session, key: StepKey) -> dict[str, float]:
    """Return the finite values of a step by name, each from its preferred source."""
    query = select(Scalar.step, Scalar.source, Scalar.name, Scalar.value).filter_by(**key._asdict())
    return preferred(session.execute(query)).get(key.step, {})


def scalars_of_active_steps(
    session: Session, run_id: str, names: Sequence[str], first: int, last: int
) -> dict[int, dict[str, float]]:
    """Return step → name → finite value, from the preferred source, for active steps `first` ≤ step ≤ `last`."""
    if not names:
        return {}
    query = select(Scalar.step, Scalar.source, Scalar.name, Scalar.value).where(*_named(run_id, names))
    return preferred(session.execute(query.where(attempts.active_rows(session, run_id, Scalar, first, last))))


def steps_with_scalars(
    session: Session, run_id: str, names: Sequence[str], after: int, limit: int
) -> list[tuple[int, int]]:
    """Return (step, attempt) of the first `limit` active steps beyond `after` that have a scalar of these names."""
    active = attempts.active_rows(session, run_id, Scalar, after + 1)
    query = select(Scalar.step, Scalar.attempt).where(*_named(run_id, names), active).distinct()
    return [(row[0], row[1]) for row in session.execute(query.order_by(Scalar.step).limit(limit))]


def newest_step_with_scalars(session: Session, run_id: str, attempt: int, names: Sequence[str]) -> int | None:
    """Return the newest step of the attempt that has a scalar of these names; None if none has."""
    # In descending order: the primary key is read from its end, and the first row usually matches.
    query = select(Scalar.step).where(*_named(run_id, names), Scalar.attempt == attempt)
    return session.scalar(query.order_by(Scalar.step.desc()).limit(1))


def _named(run_id: str, names: Sequence[str]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Scalar.run_id == run_id, Scalar.name.in_(names)


def preferred(rows: Iterable[Any]) -> dict[Any, dict[str, float]]:
    """Return key → name → finite value of rows of (key, source, name, value), each from its preferred source."""
    values: defaultdict[Any, dict[str, float]] = defaultdict(dict)
    for key, _, name, value in sorted(rows, key=lambda row: (row.source != FIRST_SOURCE, row.source)):
        if value is not None:
            values[key].setdefault(name, value)
    return values
