"""Read the curves of a run: what was read before is remembered, and an answer has a version before it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW
from foreshock_service.platform.columnar.curve_memory import joined_json, joined_tables
from foreshock_service.platform.columnar.downsampling import keep_extremes
from foreshock_service.platform.columnar.formats import JSON_MEDIA_TYPE, json_document, render
from foreshock_service.platform.columnar.reading import Kind, check_answer, read_columns
from foreshock_service.platform.columnar.table import ColumnTable
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import measurements as table
from foreshock_service.platform.query_parameters import check_step_range
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.active_attempts import is_active
from foreshock_service.runs.attempts.service import attempts_of_run, require_attempt
from foreshock_service.runs.coverage.service import statistics_steps
from foreshock_service.runs.measurements import repository
from foreshock_service.runs.measurements.curves import KEYS, Curves
from foreshock_service.runs.measurements.names import check_comparison, columns_of
from foreshock_service.runs.measurements.service import incomplete_steps
from foreshock_service.runs.runs.service import get_run


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Request for curves; no comparisons or measures: all; `attempt` None: the active steps."""

    comparisons: Sequence[str] = ()
    measures: Sequence[str] = ()
    attempt: int | None = None
    from_step: int = 0
    to_step: int = 2**31 - 1
    max_points: int | None = None


def read_curves(
    session: Session, context: ServiceContext, principal: Principal, run_id: str, query: CurveQuery
) -> Curves:
    """Return the curves of a run.

    Raises UnknownMeasure and UnknownComparison, naming what is not known, and AnswerTooLarge beyond the settings' caps.
    """
    return AskedCurves(session, context, principal, run_id, query).read()


class AskedCurves:
    """A request whose names are checked; `version` is equal for two requests only if their curves are equal.

    After a restore of the database revisions are counted again, so that the start of the service is part of it.

    The version is None for curves of earlier releases, of which the database keeps no revision. Raises as
    `read_curves`.
    """

    def __init__(
        self, session: Session, context: ServiceContext, principal: Principal, run_id: str, query: CurveQuery
    ) -> None:
        self._session, self._context, self._run_id, self._query = session, context, run_id, query
        get_run(session, principal, run_id)
        self._measures = tuple(columns_of(query.measures))
        for comparison in query.comparisons:
            if comparison != STEP_ROW:
                check_comparison(comparison)
        check_step_range(query.from_step, query.to_step)
        attempts = attempts_of_run(session, run_id)
        self._chosen: ColumnElement[bool]
        if query.attempt is not None:
            self._chosen = table.c.attempt == require_attempt(session, run_id, query.attempt).attempt
        else:
            self._chosen = is_active(attempts, table.c.attempt, table.c.step, query.from_step, query.to_step)
        active = tuple((each.attempt, each.resume_step) for each in attempts)
        self._asked = (run_id, self._measures, query.attempt, query.from_step, query.to_step, active)
        self._revisions = repository.revisions_of(session, run_id, query.comparisons)
        self._incomplete = tuple(incomplete_steps(session, run_id))
        self._statistics = tuple(statistics_steps(session, run_id, attempts))
        self.version = self._version() if self._revisions else None

    def read(self, *, with_json: bool = False) -> Curves:
        """Return the curves; with `with_json`, the JSON of their columns too, unless they are down-sampled."""
        query, json = self._query, None
        if self._revisions:
            with_json = with_json and query.max_points is None
            parts = [
                self._context.curves.get(
                    (*self._asked, comparison), revision, partial(self._read, (comparison,)), with_json=with_json
                )
                for comparison, revision in self._revisions.items()
            ]
            curves = joined_tables([each.table for each in parts])
            json = joined_json([each.json for each in parts if each.json is not None]) if with_json else None
        else:
            curves = self._read(query.comparisons)
        incomplete, sent = self._incomplete, self._statistics
        if incomplete or sent:
            shown = set(zip(curves.array("step").tolist(), curves.array("attempt").tolist(), strict=True))
            incomplete = tuple(step for step in incomplete if (step.step, step.attempt) in shown)
            sent = tuple(step for step in sent if (step.step, step.attempt) in shown)
        if query.max_points is not None:
            curves = keep_extremes(curves, ("comparison",), self._measures, query.max_points)
        check_answer(curves, self._context.settings.max_answer_values)
        return Curves(curves, self._measures, incomplete, sent, json)

    def body(self, media_type: str) -> bytes:
        """Return the answer in a format; one that was sent before is not made again."""
        if self.version is None:
            return self._render(media_type)
        return self._context.curves.answer((self.version, media_type), partial(self._render, media_type))

    def _render(self, media_type: str) -> bytes:
        curves = self.read(with_json=media_type == JSON_MEDIA_TYPE)
        beside = curves.beside()
        return (
            json_document(curves.json, beside) if curves.json is not None else render(curves.table, media_type, beside)
        )

    def _read(self, comparisons: Sequence[str], after: int = -1) -> ColumnTable:
        query, settings = self._query, self._context.settings
        steps = (max(query.from_step, after + 1), query.to_step)
        statement = repository.curves_query(self._run_id, self._chosen, comparisons, self._measures, steps)
        kinds: dict[str, Kind] = {**KEYS, **dict.fromkeys(self._measures, "float")}
        most = settings.max_answer_values if query.max_points is None else settings.max_read_values
        return read_columns(self._session, statement, kinds, most).sorted_by("comparison", "step", "attempt")

    def _version(self) -> str:
        beside = [each.model_dump() for each in (*self._incomplete, *self._statistics)]
        asked = (self._context.start, self._asked, self._query.max_points, list(self._revisions.items()), beside)
        return hashlib.blake2b(repr(asked).encode(), digest_size=12).hexdigest()
