"""Columnar answers as numpy arrays. NaN means "not estimable", which is null in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.api.records import parse
from foreshock.api.runs import Coverage, IncompleteStep, StatisticsStep
from foreshock.errors import did_you_mean

# Types of the columns that are not float64. All others are: a measure may have any name and lack values.
_STEPS = {"step": np.int64, "attempt": np.int64}
_MEASUREMENTS = {**_STEPS, "comparison": np.object_, "from_sample": np.bool_}
_SCALARS = {**_STEPS, "source": np.object_, "name": np.object_}
_BUCKETS = {"tokens": np.int64}
_TOKENS = {
    "sample_id": np.object_, "shard": np.int64, "position": np.int64, "token_id": np.int64, "generated": np.bool_,
    "d": np.float64,
}  # fmt: skip


class Columns(dict[str, NDArray[Any]]):
    """Columns of equal length by name: int64, float64, bool, or objects for text; `rows` is their length.

    It is a dict, so that `pandas.DataFrame(columns)` is a frame of them and `pyarrow.table(columns)` a table.
    """

    def __missing__(self, name: str) -> NDArray[Any]:
        raise KeyError(f"no column {name!r}{did_you_mean(name, self)}; columns: {', '.join(self)}")

    def __repr__(self) -> str:
        return f"Columns({self.rows} rows of {', '.join(self)})"

    @property
    def rows(self) -> int:
        """The length of the columns."""
        return len(next(iter(self.values()), ()))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Curves of a run, ordered by comparison and step.

    `columns` has `step`, `attempt`, `comparison`, `from_sample` and one float64 column for each measure.
    """

    columns: Columns
    incomplete_steps: tuple[IncompleteStep, ...] = ()
    statistics_steps: tuple[StatisticsStep, ...] = ()

    def curve(self, comparison: str, measure: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps and the values of one measure of one comparison; empty arrays if it was not measured.

        `measure` is the name of its column (`foreshock.measures.registry`). Raises KeyError if it was not asked for.
        """
        chosen = self.columns["comparison"] == comparison
        return self.columns["step"][chosen], self.columns[measure][chosen]


@dataclass(frozen=True, slots=True)
class Scalars:
    """Scalars of a run, ordered by name, source and step: `step`, `attempt`, `source`, `name`, `value`."""

    columns: Columns

    def curve(self, name: str, source: str | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps and the values of a name, of one source or of all."""
        chosen = self.columns["name"] == name
        if source is not None:
            chosen &= self.columns["source"] == source
        return self.columns["step"][chosen], self.columns["value"][chosen]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The mismatch of a step in buckets of a condition: bucket i holds edges[i] ≤ value < edges[i + 1].

    `edges` [buckets + 1] are infinite where a bucket has no end. A bucket without tokens has NaN in its columns.
    """

    by: str
    meaning: str
    unit: str
    edges: NDArray[np.float64]
    columns: Columns
    coverage: Coverage
    incomplete: IncompleteStep | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Response tokens of a step: the worst by |d|, or those of one rollout in order.

    `columns` has `sample_id`, `shard`, `position` (in the response, from 0), `token_id`, `generated` (False: tool
    output, excluded from all measures) and `d` = log target − log behaviour, in nats. `log_probs` has an array [tokens]
    for each scorer. `prompt_token_ids` is the prompt of the rollout, None for the worst tokens.
    """

    comparison: str
    step: int
    attempt: int
    columns: Columns
    log_probs: Mapping[str, NDArray[np.float64]]
    coverage: Coverage
    sample_id: str | None = None
    prompt_token_ids: NDArray[np.int64] | None = None
    incomplete: IncompleteStep | None = None


def measurements(value: Mapping[str, Any]) -> Measurements:
    """Parse `GET …/measurements`."""
    return Measurements(
        _columns(value["columns"], _MEASUREMENTS),
        tuple(parse(IncompleteStep, each) for each in value.get("incomplete_steps") or ()),
        tuple(parse(StatisticsStep, each) for each in value.get("statistics_steps") or ()),
    )


def scalars(value: Mapping[str, Any]) -> Scalars:
    """Parse `GET …/scalars`."""
    return Scalars(_columns(value["columns"], _SCALARS))


def buckets(value: Mapping[str, Any]) -> Buckets:
    """Parse `GET …/buckets`."""
    edges = _floats(value["edges"])
    ends = np.isnan(edges)
    edges[ends] = np.where(np.arange(len(edges))[ends] == 0, -np.inf, np.inf)
    return Buckets(
        value["by"],
        value["meaning"],
        value["unit"],
        edges,
        _columns(value["columns"], _BUCKETS),
        parse(Coverage, value["coverage"]),
        _incomplete(value),
    )


def tokens(value: Mapping[str, Any]) -> Tokens:
    """Parse `GET …/tokens`."""
    items: Sequence[Mapping[str, Any]] = value["items"]
    prompt = value.get("prompt_token_ids")
    return Tokens(
        value["comparison"],
        value["step"],
        value["attempt"],
        _columns({name: [item[name] for item in items] for name in _TOKENS}, _TOKENS),
        {scorer: _floats([item["log_probs"].get(scorer) for item in items]) for scorer in value["scorers"]},
        parse(Coverage, value["coverage"]),
        value.get("sample_id"),
        None if prompt is None else np.array(prompt, dtype=np.int64),
        _incomplete(value),
    )


def _columns(columns: Mapping[str, Sequence[Any]], types: Mapping[str, type]) -> Columns:
    # numpy reads None as NaN in a column of floats.
    return Columns({name: np.array(values, types.get(name, np.float64)) for name, values in columns.items()})


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    # numpy reads None as NaN.
    return np.array(values, dtype=np.float64)


def _incomplete(value: Mapping[str, Any]) -> IncompleteStep | None:
    found = value.get("incomplete")
    return None if found is None else parse(IncompleteStep, found)
