"""Curves over steps: the requested rows of the wide table, by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshock_service.platform.columnar.reading import Kind
from foreshock_service.platform.columnar.table import ColumnTable
from foreshock_service.runs.coverage.schemas import StatisticsStep
from foreshock_service.runs.shard_schemas import IncompleteStep
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

    json: Mapping[str, Sequence[bytes]] | None = None
    """The JSON of the columns, in pieces, if it is known."""

    def by_comparison(self) -> dict[str, ColumnTable]:
        """Return the rows of each comparison."""
        names = self.table.strings("comparison")
        groups = self.table.groups("comparison")
        return {names[first]: self.table.rows(np.arange(first, end)) for first, end in groups}

    def beside(self) -> dict[str, Any]:
        """Return what the JSON has beside the columns."""
        return {
            "incomplete_steps": [step.model_dump() for step in self.incomplete],
            "statistics_steps": [step.model_dump() for step in self.statistics],
        }


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measures of one comparison at one active step, by column; None if not estimable."""

    key: StepKey
    computed_at_us: int
    values: dict[str, float | None]
