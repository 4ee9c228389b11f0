"""HTTP: measures, curves over steps, and buckets of tokens."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from cachetools import LRUCache
from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, select, tuple_
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, parse, to_json
from foreshock.api.runs import IncompleteStep, MeasureRecord, StatisticsStep
from foreshock.api.steps import BucketColumns, BucketsRecord, TokenIdColumns, TokenIdsRecord
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.errors import did_you_mean
from foreshock.measures.registry import MEASURES, measure_named
from foreshock.measures.statistics import conditions, token_ids
from foreshock_service.platform import columnar, pagination, parameters, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import NewestMeasurement, measurements
from foreshock_service.runs import attempts, runs
from foreshock_service.runs.measurements import check_comparison, read_statistics
from foreshock_service.runs.steps import coverage_of_step, incomplete_steps, statistics_steps, with_shards

router = parameters.api_router(prefix="/v1", tags=["measurements"])

By = Literal["probability", "position", "turn", "length", "entropy", "lag", "token_id"]
Comparison = Annotated[parameters.Name, Query(description="`target/behaviour`")]

_KEYS: Mapping[str, columnar.Kind] = {
    "step": "integer",
    "attempt": "integer",
    "comparison": "label",
    "from_sample": "boolean",
}


class MeasurementColumns(BaseModel):
    """Columns of equal length; in addition to these, one list per measure (null: not estimable)."""

    model_config = ConfigDict(extra="allow")

    step: list[int]
    attempt: list[int]
    comparison: list[str]
    from_sample: list[bool] = Field(description="true: only some of the step's rollouts are included")


class MeasurementsRead(BaseModel):
    """Measurements by column, ordered by comparison and step."""

    columns: MeasurementColumns
    incomplete_steps: list[IncompleteStep] = Field(description="those among the steps of `columns`")
    statistics_steps: list[StatisticsStep] = Field(
        description="those of which shards were sent as statistics, newest first, at most 1,000"
    )


class UnknownMeasure(problem.ProblemError, status=422, problem_type="unknown-measure"):
    """Unknown measure: the name is not registered."""


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Request for curves; no comparisons or measures: all; `attempt` None: the active steps."""

    comparisons: Sequence[str] = ()
    measures: Sequence[str] = ()
    attempt: int | None = None
    from_step: int = 0
    to_step: int = parameters.LARGEST_STEP
    max_points: int | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows by comparison and step: step, attempt, comparison, from_sample, then the measures, NaN if missing."""

    table: columnar.ColumnTable
    measures: tuple[str, ...]
    incomplete: tuple[IncompleteStep, ...] = ()
    """The steps among them that closed without some of their shards."""
    statistics: tuple[StatisticsStep, ...] = ()
    """The steps among them with shards that were sent as statistics."""

    def by_comparison(self) -> dict[str, columnar.ColumnTable]:
        """Return the rows of each comparison."""
        names = self.table.strings("comparison")
        groups = self.table.groups("comparison")
        return {names[first]: self.table.rows(np.arange(first, end)) for first, end in groups}


@router.get("/measures")
def list_measures(_: security.Reader) -> pagination.Page[MeasureRecord]:
    """List all registered measures."""
    return pagination.Page(items=[from_attributes(MeasureRecord, measure) for measure in MEASURES])


@router.get("/runs/{run}/measurements", response_model=MeasurementsRead, responses=columnar.FORMATS)
def read_measurements(
    asked: runs.RunToRead,
    request: Request,
    comparison: Annotated[list[parameters.Name] | None, Query(max_length=100, description="absent: all")] = None,
    measure: Annotated[list[parameters.Name] | None, Query(max_length=200, description="absent: all")] = None,
    from_step: parameters.FromStep = 0,
    to_step: parameters.ToStep = parameters.LARGEST_STEP,
    attempt: parameters.ActiveOrAttempt = None,
    max_points: parameters.MaxPoints = None,
    format_name: columnar.Format = None,
) -> Response:
    """Return curves over steps, by column: JSON, CSV or Parquet. A curve of `max_points` is one comparison."""
    media_type = columnar.choose_format(request.headers.get("accept"), format_name)
    query = CurveQuery(comparison or (), measure or (), attempt, from_step, to_step, max_points)
    with asked.reading() as session:
        curves = read_curves(session, asked.context, asked.principal, asked.run, query)
    beside = {
        "incomplete_steps": [to_json(step) for step in curves.incomplete],
        "statistics_steps": [to_json(step) for step in curves.statistics],
    }
    return columnar.columnar_response(request, columnar.render(curves.table, media_type, beside), media_type)


@router.get(
    "/runs/{run}/steps/{step}/buckets", response_model=BucketsRecord | TokenIdsRecord, responses=columnar.FORMATS
)
def read_buckets(
    asked: attempts.StepOfRequest,
    request: Request,
    comparison: Comparison = TRAINER_ROLLOUT,
    by: Annotated[By, Query(description="condition that defines the buckets")] = "probability",
    limit: Annotated[
        int, Query(ge=1, le=token_ids.KEPT_TOKEN_IDS, description="maximum number of token ids")
    ] = token_ids.KEPT_TOKEN_IDS,
    format_name: columnar.Format = None,
) -> Response:
    """Return the mismatch in buckets of the token's probability under the behaviour score, or of another condition.

    Buckets without tokens are included; if all are empty, the rollouts do not contain the condition. CSV and Parquet
    have a row for each bucket, low ≤ value < high (empty: unbounded), or for each token id.
    """
    media_type = columnar.choose_format(request.headers.get("accept"), format_name)
    with asked.reading() as session:
        key = asked.key(session)
        statistics = read_statistics(session, key, comparison)
        coverage = coverage_of_step(session, key, statistics.rollouts)
        found: BucketsRecord | TokenIdsRecord
        if by == "token_id":
            ids = statistics.token_id_table(limit)
            floats = ("mean_abs_d", "mean_d", "k3_kl", "k3_sum", "k3_sum_missing")
            found = TokenIdsRecord(
                coverage=coverage,
                k3_sum_unnamed=ids.k3_sum_unnamed,
                columns=TokenIdColumns(
                    token_id=tuple(ids.token_ids.tolist()),
                    tokens=tuple(ids.tokens.tolist()),
                    **{name: tuple(getattr(ids, name).tolist()) for name in floats},
                ),
            )
        else:
            table = statistics.condition_table(by)
            found = BucketsRecord(
                by=by,
                meaning=conditions.CONDITIONS[by].meaning,
                unit=conditions.CONDITIONS[by].unit,
                edges=tuple(table.edges.tolist()),
                columns=parse(BucketColumns, table.columns()),
                coverage=coverage,
            )
        shown = to_json(with_shards(session, key, found))
    if media_type == columnar.JSON_MEDIA_TYPE:
        return columnar.columnar_response(request, orjson.dumps(shown), media_type)
    bounds = {"low": shown["edges"][:-1], "high": shown["edges"][1:]} if "edges" in shown else {}
    return columnar.columnar_response(
        request, columnar.render(columnar.table_of_lists({**bounds, **shown["columns"]}), media_type), media_type
    )


def read_curves(
    session: Session, context: ServiceContext, principal: security.Principal, run_id: str, query: CurveQuery
) -> Curves:
    """Return the curves of a run. Raises UnknownMeasure, UnknownComparison, AnswerTooLarge."""
    runs.get_run(session, principal, run_id)
    measures = tuple(columns_of(query.measures))
    for comparison in query.comparisons:
        if comparison != STEP_ROW:
            check_comparison(comparison)
    parameters.check_step_range(query.from_step, query.to_step)
    settings, wide = context.settings, measurements.c
    kinds: dict[str, columnar.Kind] = {**_KEYS, **dict.fromkeys(measures, "float")}
    # The comparison is not selected if it is the same in every row: fetching and encoding it is a tenth of the time.
    constants = {"comparison": query.comparisons[0]} if len(query.comparisons) == 1 else {}
    chosen = attempts.rows_of_steps(session, run_id, query.attempt, wide, query.from_step, query.to_step)
    statement = select(*(wide[name] for name in kinds if name not in constants)).where(wide.run_id == run_id, chosen)
    if query.comparisons:
        statement = statement.where(wide.comparison.in_(query.comparisons))
    most = columnar.most_values(settings, query.max_points)
    is_whole = query.attempt is None and (query.from_step, query.to_step) == (0, parameters.LARGEST_STEP)
    if is_whole and constants:
        table = _active_rows(session, run_id, statement, kinds, most, constants)
    else:
        table = columnar.read_columns(session, statement, kinds, most, constants)
        table = table.sorted_by("comparison", "step", "attempt")
    incomplete = tuple(incomplete_steps(session, run_id))
    sent = tuple(statistics_steps(session, run_id))
    if incomplete or sent:
        shown = set(zip(table.array("step").tolist(), table.array("attempt").tolist(), strict=True))
        incomplete = tuple(step for step in incomplete if (step.step, step.attempt) in shown)
        sent = tuple(step for step in sent if (step.step, step.attempt) in shown)
    if query.max_points is not None:
        table = columnar.keep_extremes(table, ("comparison",), measures, query.max_points)
    columnar.check_answer(table, settings.max_answer_values)
    return Curves(table, measures, incomplete, sent)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The rows of a comparison up to `newest`, (attempt, step), as they were at `revision`."""

    newest: tuple[int, int]
    revision: int
    table: columnar.ColumnTable


# A cache: the driver makes an object of each value, 70 ms for 10,000 steps of 20 measures, and pages repeat queries.
_kept: LRUCache[tuple[object, ...], _Kept] = LRUCache(64 << 20, getsizeof=lambda each: 8 * each.table.num_values + 1024)
_kept_lock = threading.Lock()


def _active_rows(
    session: Session,
    run_id: str,
    statement: Select[Any],
    kinds: Mapping[str, columnar.Kind],
    most_values: int,
    constants: Mapping[str, str],
) -> columnar.ColumnTable:
    """Return all active rows of one comparison by step. Rows read before are cached; only newer ones are read.

    `newest_measurements` shows whether an older row was written since (a late shard, a resume);
    then all rows are read again. Raises AnswerTooLarge.
    """
    noted = session.scalar(select(NewestMeasurement).filter_by(run_id=run_id, **constants))
    if noted is None:
        return columnar.read_columns(session, statement, kinds, most_values, constants).sorted_by("step")
    newest, place = (noted.attempt, noted.step), tuple_(measurements.c.attempt, measurements.c.step)
    active = tuple(attempts.active_ranges(attempts.attempts_of_run(session, run_id)))
    key = (run_id, *constants.values(), *kinds, active)
    with _kept_lock:
        before = _kept.get(key)
    # Rows that were committed after `noted` was read are left for the next call.
    statement = statement.where(place <= newest)
    # Another request may have cached rows that this snapshot does not see yet.
    if before is not None and noted.rewritten <= before.revision <= noted.revision:
        statement, table = statement.where(place > before.newest), before.table
        if before.newest != newest:
            table = table.joined_with(columnar.read_columns(session, statement, kinds, most_values, constants))
        columnar.check_rows(table.num_rows, len(kinds), most_values)
    else:
        table = columnar.read_columns(session, statement, kinds, most_values, constants)
    steps = table.array("step")
    if (steps[1:] <= steps[:-1]).any():
        table = table.sorted_by("step")
    with _kept_lock:
        if 8 * table.num_values < _kept.maxsize // 4:
            _kept[key] = _Kept(newest, noted.revision, table)
    return table


def columns_of(names: Sequence[str]) -> Sequence[str]:
    """Return the columns of these measures; without names, of all. Raises UnknownMeasure naming each unknown one."""
    known = {measure.column: None for measure in MEASURES}
    if not names:
        return list(known)
    columns: dict[str, None] = {}
    unknown = []
    for name in names:
        try:
            columns[measure_named(name).column] = None
        except KeyError:
            unknown.append(name)
    if unknown:
        known |= {measure.name: None for measure in MEASURES}
        each = "; ".join(f"unknown measure {name!r}{did_you_mean(name, known)}" for name in unknown)
        raise UnknownMeasure(f"query.measure: {each} (names: GET /v1/measures)")
    return list(columns)
