"""Curves over steps: the requested rows of the wide table, by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.runs.coverage.schemas import StatisticsStep
from service.runs.shard_counts import IncompleteStep
from service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows of the wide table: (step, attempt, comparison) of each, and the chosen measures, None where absent.

    `from_sample` is true for rows that include only some of the step's rollouts.
    """

    measures: tuple[str, ...]
    keys: list[tuple[int, int, str]]
    values: list[tuple[float | None, ...]]
    from_sample: list[bool]
    incomplete: tuple[IncompleteStep, ...] = ()
    """Those of the steps that closed without some of their shards."""
    statistics: tuple[StatisticsStep, ...] = ()
    """Those of the steps of which shards were sent as statistics."""

    def rows(self, chosen: Sequence[int]) -> Curves:
        """Return these rows only, in this order."""
        return Curves(
            self.measures,
            [self.keys[row] for row in chosen],
            [self.values[row] for row in chosen],
            [self.from_sample[row] for row in chosen],
            self.incomplete,
            self.statistics,
        )


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measures of one comparison at one active step, by column; None if not estimable."""

    key: StepKey
    computed_at_us: int
    values: dict[str, float | None]
