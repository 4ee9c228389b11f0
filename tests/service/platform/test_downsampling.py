"""Down-sampling keeps the ends and the extremes of each curve."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock_service.platform.columnar import ColumnTable, Labels, keep_extremes

VALUES = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf]))


def finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the finite values."""
    kept: NDArray[np.float64] = values[np.isfinite(values)]
    return kept


@given(st.lists(st.tuples(VALUES, st.floats(-1, 1)), min_size=1, max_size=200), st.integers(2, 60))
def test_ends_and_extremes_are_kept(rows: list[tuple[float, float]], most: int) -> None:
    values = np.array(rows, dtype=np.float64)
    columns = {"step": np.arange(len(rows)), "curve": np.zeros(len(rows)), "a": values[:, 0], "b": values[:, 1]}
    kept = keep_extremes(ColumnTable(columns), ("curve",), ("a", "b"), most)
    steps = kept.array("step").tolist()
    assert len(steps) <= max(most, 6)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, len(rows) - 1)
    for name in ("a", "b"):
        whole, rest = finite(ColumnTable(columns).array(name)), finite(kept.array(name))
        if whole.size:
            assert (rest.min(), rest.max()) == (whole.min(), whole.max())


def test_each_curve_is_sampled_alone() -> None:
    curve = Labels(np.repeat([1, 0], 100).astype(np.int32), ("loss", "entropy"))
    value = np.zeros(200)
    value[[33, 166]] = 5.0
    kept = keep_extremes(ColumnTable({"step": np.arange(200), "name": curve, "value": value}), ("name",), ("value",), 8)
    assert {0, 33, 99, 100, 166, 199} <= set(kept.array("step").tolist())
    assert kept.num_rows <= 16
    assert set(kept.strings("name")) == {"loss", "entropy"}


def test_an_empty_table_stays_empty() -> None:
    table = ColumnTable({"step": np.empty(0, np.int64), "value": np.empty(0)})
    assert keep_extremes(table, ("step",), ("value",), 2).num_rows == 0
