"""Curves over steps: rows of the wide table by column, and the names of measures and comparisons in queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshock.api.records import to_json
from foreshock.api.runs import IncompleteStep, StatisticsStep
from foreshock.comparisons import comparison_name
from foreshock.errors import did_you_mean
from foreshock.measures.registry import MEASURES, measure_named
from foreshock.scorers import SCORERS, VARIANTS, score_name
from foreshock_service.platform.columnar import ColumnTable, Kind
from foreshock_service.platform.problem import ProblemError
from foreshock_service.runs.step_key import StepKey

KEYS: Mapping[str, Kind] = {"step": "integer", "attempt": "integer", "comparison": "label", "from_sample": "boolean"}
"""Columns of curves before the measures. `from_sample`: only some of the step's rollouts are included."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows of the wide table by comparison and step: the columns `KEYS`, then the measures, NaN if missing."""

    table: ColumnTable
    measures: tuple[str, ...]
    incomplete: tuple[IncompleteStep, ...] = ()
    """Those of the steps that closed without some of their shards."""
    statistics: tuple[StatisticsStep, ...] = ()
    """Those of the steps of which shards were sent as statistics."""

    def by_comparison(self) -> dict[str, ColumnTable]:
        """Return the rows of each comparison."""
        names = self.table.strings("comparison")
        groups = self.table.groups("comparison")
        return {names[first]: self.table.rows(np.arange(first, end)) for first, end in groups}

    def beside(self) -> dict[str, Any]:
        """Return what the JSON has beside the columns."""
        return {
            "incomplete_steps": [to_json(step) for step in self.incomplete],
            "statistics_steps": [to_json(step) for step in self.statistics],
        }


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measures of one comparison at one active step, by column; None if not estimable."""

    key: StepKey
    computed_at_us: int
    values: dict[str, float | None]


class UnknownMeasure(ProblemError):
    """Unknown measure: the name is not registered."""

    status = 422
    problem_type = "unknown-measure"


class UnknownComparison(ProblemError):
    """Unknown comparison: not `target/behaviour` of two scorers."""

    status = 422
    problem_type = "unknown-comparison"


def columns_of(names: Sequence[str]) -> Sequence[str]:
    """Return the columns of these measures, of all for no name. Raises UnknownMeasure naming each unknown one."""
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


def check_comparison(name: str) -> None:
    """Raise UnknownComparison unless the name is `target/behaviour` of two different scores."""
    scores = [score_name(scorer, variant) for scorer in SCORERS for variant in VARIANTS]
    target, _, behaviour = name.partition("/")
    if target not in scores or behaviour not in scores or target == behaviour:
        known = [comparison_name(first, second) for first in scores for second in scores if first != second]
        scorers = ", ".join(SCORERS)
        raise UnknownComparison(
            f"query.comparison: unknown comparison {name!r}{did_you_mean(name, known)} (target/behaviour of {scorers})"
        )
